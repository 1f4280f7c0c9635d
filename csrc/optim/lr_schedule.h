// Learning-rate schedules as pure functions of the iteration. A schedule holds one entry per parameter group.
//
// Iterations count optimizer steps from 0; -1 means "before the first step" and gives the value the first step of
// training runs with. Every integer is accepted; past its end a schedule stays where its last phase leads.
// Constructors fail with ErrorKind::kValue, naming the parameter, its value and what is allowed.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ds::optim {

using PerGroup = std::vector<double>;

enum class WarmupCurve { kLog, kLinear };

// "log" or "linear"; anything else fails.
WarmupCurve warmup_curve(const std::string& name);

// The share of the way from the lower to the upper rate: 0 at the start, 1 from `num_steps` on.
// log: log(i + 1) / log(num_steps), linear: i / num_steps. num_steps below 2 counts as 2 (log(1) divides nothing).
double warmup_gamma(WarmupCurve curve, int64_t num_steps, int64_t iteration);

// Rises from min_lr to max_lr over num_steps, then stays.
class WarmupLr {
 public:
  WarmupLr(PerGroup min_lr, PerGroup max_lr, int64_t num_steps, WarmupCurve curve);
  PerGroup lr(int64_t iteration) const;

 protected:
  PerGroup at(double gamma) const;

  PerGroup min_lr_, max_lr_;
  int64_t num_steps_;
  WarmupCurve curve_;
};

// As WarmupLr up to num_steps; then falls on a line that starts at max_lr and would reach gamma = 0 at total_steps:
// gamma = (total - i) / (total - num_steps), never below 0. min_lr + 0 * (max_lr - min_lr) is min_lr.
class WarmupDecayLr : private WarmupLr {
 public:
  WarmupDecayLr(PerGroup min_lr, PerGroup max_lr, int64_t num_steps, WarmupCurve curve, int64_t total_steps);
  PerGroup lr(int64_t iteration) const;

 private:
  int64_t total_steps_;
};

// A factor on each group's own rate: rises from min_ratio to 1 over num_steps, then half a cosine down to
// cos_min_ratio, which it reaches at iteration total_steps - 1 (the last of total_steps) and keeps.
class WarmupCosineLr {
 public:
  WarmupCosineLr(PerGroup base_lr, double min_ratio, int64_t num_steps, double cos_min_ratio, WarmupCurve curve,
                 int64_t total_steps);
  double ratio(int64_t iteration) const;
  PerGroup lr(int64_t iteration) const;

 private:
  PerGroup base_lr_;
  double min_ratio_, cos_min_ratio_;
  int64_t num_steps_, total_steps_;
  WarmupCurve curve_;
};

// min_lr * (1 + step_rate * interval), interval = (i + 1) / step_size, rounded down with `staircase` (Smith 2017,
// "Cyclical learning rates", section 3.3).
class LrRangeTest {
 public:
  LrRangeTest(PerGroup min_lr, int64_t step_size, double step_rate, bool staircase);
  PerGroup lr(int64_t iteration) const;

 private:
  PerGroup min_lr_;
  int64_t step_size_;
  double step_rate_;
  bool staircase_;
};

// One up-and-down cycle, then decay (Smith 2018, "A disciplined approach to neural network hyper-parameters").
struct CycleShape {
  int64_t first_steps;   // >= 1, from low to high
  int64_t second_steps;  // >= 1, from high to low
  int64_t first_stairs;  // 0: continuous; else that many equal jumps in the half
  int64_t second_stairs;
  int64_t decay_steps;  // length of one decay unit; 0: no decay phase, the value stays at its lower end

  void validate() const;
  // Position in the cycle: 0 at its ends, 1 at the peak.
  double height(int64_t iteration) const;
  // Decay units passed since the cycle ended; 0 during the cycle and without a decay phase.
  double decay_units(int64_t iteration) const;
};

// lr: min_lr + height * (max_lr - min_lr), in the decay phase min_lr / (1 + lr_decay_rate * units).
class OneCycleLr {
 public:
  OneCycleLr(PerGroup min_lr, PerGroup max_lr, double decay_rate, CycleShape shape);
  PerGroup lr(int64_t iteration) const;

 private:
  PerGroup min_lr_, max_lr_;
  double decay_rate_;
  CycleShape shape_;
};

// The mirror image: max_mom - height * (max_mom - min_mom), in the decay phase max_mom * (1 + decay_rate * units).
class OneCycleMomentum {
 public:
  OneCycleMomentum(PerGroup min_mom, PerGroup max_mom, double decay_rate, CycleShape shape);
  PerGroup momentum(int64_t iteration) const;

 private:
  PerGroup min_mom_, max_mom_;
  double decay_rate_;
  CycleShape shape_;
};

}  // namespace ds::optim

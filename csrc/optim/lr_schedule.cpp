#include "optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace ds::optim {
namespace {

constexpr double kPi = 3.14159265358979323846;

void require(bool ok, const char* name, double value, const char* allowed) {
  if (!ok)
    fail(ErrorKind::kValue, "scheduler parameter ", name, " = ", value, " is not allowed: it must be ", allowed, ".");
}

void require_rates(const PerGroup& rates, const char* name) {
  for (double rate : rates) require(std::isfinite(rate) && rate >= 0, name, rate, "a finite number >= 0");
}

void require_ordered(const PerGroup& low, const PerGroup& high, const char* low_name, const char* high_name) {
  if (low.size() != high.size())
    fail(ErrorKind::kValue, "scheduler parameters ", low_name, " and ", high_name, " have ", low.size(), " and ",
         high.size(), " values; both need one per parameter group.");
  for (size_t g = 0; g < low.size(); ++g)
    if (low[g] > high[g])
      fail(ErrorKind::kValue, "scheduler parameter ", low_name, " = ", low[g], " is above ", high_name, " = ", high[g],
           " (parameter group ", g, "). Lower ", low_name, " or raise ", high_name, ".");
}

// Exact at both ends: a plain a + t * (b - a) may miss b by a rounding error.
double between(double low, double high, double share) {
  if (share >= 1) return high;
  return low + (high - low) * share;
}

double quotient(int64_t a, int64_t b) { return static_cast<double>(a) / static_cast<double>(b); }

// done / steps, rounded down to a multiple of 1 / count; in integers, because 0.29 * 100 is below 29.
double stairs(int64_t done, int64_t steps, int64_t count) {
  return count == 0 ? quotient(done, steps) : quotient(done * count / steps, count);
}

}  // namespace

WarmupCurve warmup_curve(const std::string& name) {
  if (name == "log") return WarmupCurve::kLog;
  if (name == "linear") return WarmupCurve::kLinear;
  fail(ErrorKind::kValue, "scheduler parameter warmup_type = '", name, "' is not known: use 'log' or 'linear'.");
}

double warmup_gamma(WarmupCurve curve, int64_t num_steps, int64_t iteration) {
  const int64_t steps = std::max<int64_t>(2, num_steps);
  if (iteration <= 0) return 0;
  if (iteration >= steps) return 1;
  if (curve == WarmupCurve::kLinear) return quotient(iteration, steps);
  return std::log(static_cast<double>(iteration + 1)) / std::log(static_cast<double>(steps));
}

// ---- WarmupLr ------------------------------------------------------------------------------------------------------

WarmupLr::WarmupLr(PerGroup min_lr, PerGroup max_lr, int64_t num_steps, WarmupCurve curve)
    : min_lr_(std::move(min_lr)),
      max_lr_(std::move(max_lr)),
      num_steps_(std::max<int64_t>(2, num_steps)),
      curve_(curve) {
  require_rates(min_lr_, "warmup_min_lr");
  require_rates(max_lr_, "warmup_max_lr");
  require_ordered(min_lr_, max_lr_, "warmup_min_lr", "warmup_max_lr");
  require(num_steps >= 0, "warmup_num_steps", static_cast<double>(num_steps), ">= 0");
}

PerGroup WarmupLr::at(double gamma) const {
  PerGroup rates(min_lr_.size());
  for (size_t g = 0; g < rates.size(); ++g) rates[g] = between(min_lr_[g], max_lr_[g], gamma);
  return rates;
}

PerGroup WarmupLr::lr(int64_t iteration) const { return at(warmup_gamma(curve_, num_steps_, iteration)); }

// ---- WarmupDecayLr -------------------------------------------------------------------------------------------------

WarmupDecayLr::WarmupDecayLr(PerGroup min_lr, PerGroup max_lr, int64_t num_steps, WarmupCurve curve,
                             int64_t total_steps)
    : WarmupLr(std::move(min_lr), std::move(max_lr), num_steps, curve), total_steps_(total_steps) {
  require(total_steps >= 1, "total_num_steps", static_cast<double>(total_steps), ">= 1");
}

PerGroup WarmupDecayLr::lr(int64_t iteration) const {
  if (iteration < num_steps_) return WarmupLr::lr(iteration);
  const int64_t span = std::max<int64_t>(1, total_steps_ - num_steps_);
  return at(std::max(0.0, quotient(total_steps_ - iteration, span)));
}

// ---- WarmupCosineLr ------------------------------------------------------------------------------------------------

WarmupCosineLr::WarmupCosineLr(PerGroup base_lr, double min_ratio, int64_t num_steps, double cos_min_ratio,
                               WarmupCurve curve, int64_t total_steps)
    : base_lr_(std::move(base_lr)),
      min_ratio_(min_ratio),
      cos_min_ratio_(cos_min_ratio),
      num_steps_(std::max<int64_t>(2, num_steps)),
      total_steps_(total_steps),
      curve_(curve) {
  require(min_ratio >= 0 && min_ratio <= 1, "warmup_min_ratio", min_ratio, "between 0 and 1");
  require(cos_min_ratio >= 0 && cos_min_ratio <= 1, "cos_min_ratio", cos_min_ratio, "between 0 and 1");
  require(num_steps >= 0, "warmup_num_steps", static_cast<double>(num_steps), ">= 0");
  require(total_steps >= 1, "total_num_steps", static_cast<double>(total_steps), ">= 1");
}

double WarmupCosineLr::ratio(int64_t iteration) const {
  if (iteration < num_steps_) return between(min_ratio_, 1.0, warmup_gamma(curve_, num_steps_, iteration));
  const int64_t span = total_steps_ - num_steps_;
  const int64_t done = iteration - num_steps_ + 1;
  if (done >= span) return cos_min_ratio_;  // the cosine itself would rise again
  return cos_min_ratio_ + (1 - cos_min_ratio_) * (1 + std::cos(kPi * quotient(done, span))) / 2;
}

PerGroup WarmupCosineLr::lr(int64_t iteration) const {
  const double factor = ratio(iteration);
  PerGroup rates = base_lr_;
  for (double& rate : rates) rate *= factor;
  return rates;
}

// ---- LrRangeTest ---------------------------------------------------------------------------------------------------

LrRangeTest::LrRangeTest(PerGroup min_lr, int64_t step_size, double step_rate, bool staircase)
    : min_lr_(std::move(min_lr)), step_size_(step_size), step_rate_(step_rate), staircase_(staircase) {
  require_rates(min_lr_, "lr_range_test_min_lr");
  require(step_size >= 1, "lr_range_test_step_size", static_cast<double>(step_size), ">= 1");
  require(std::isfinite(step_rate) && step_rate >= 0, "lr_range_test_step_rate", step_rate, "a finite number >= 0");
}

PerGroup LrRangeTest::lr(int64_t iteration) const {
  const int64_t done = std::max<int64_t>(0, iteration + 1);
  const double interval = staircase_ ? static_cast<double>(done / step_size_) : quotient(done, step_size_);
  PerGroup rates = min_lr_;
  for (double& rate : rates) rate *= 1 + step_rate_ * interval;
  return rates;
}

// ---- OneCycle ------------------------------------------------------------------------------------------------------

void CycleShape::validate() const {
  require(first_steps >= 1, "cycle_first_step_size", static_cast<double>(first_steps), ">= 1");
  require(second_steps >= 0, "cycle_second_step_size", static_cast<double>(second_steps), ">= 0");
  require(first_stairs >= 0, "cycle_first_stair_count", static_cast<double>(first_stairs), ">= 0");
  require(second_stairs >= 0, "cycle_second_stair_count", static_cast<double>(second_stairs), ">= 0");
  require(decay_steps >= 0, "decay_step_size", static_cast<double>(decay_steps), ">= 0");
}

double CycleShape::height(int64_t iteration) const {
  const int64_t done = std::max<int64_t>(0, iteration + 1);
  if (done >= first_steps + second_steps) return 0;  // without a second half: from its end on, instead of the peak
  if (done <= first_steps) return stairs(done, first_steps, first_stairs);
  return 1 - stairs(done - first_steps, second_steps, second_stairs);
}

double CycleShape::decay_units(int64_t iteration) const {
  const int64_t past = iteration + 1 - first_steps - second_steps;
  return decay_steps == 0 || past <= 0 ? 0 : quotient(past, decay_steps);
}

OneCycleLr::OneCycleLr(PerGroup min_lr, PerGroup max_lr, double decay_rate, CycleShape shape)
    : min_lr_(std::move(min_lr)), max_lr_(std::move(max_lr)), decay_rate_(decay_rate), shape_(shape) {
  require_rates(min_lr_, "cycle_min_lr");
  require_rates(max_lr_, "cycle_max_lr");
  require_ordered(min_lr_, max_lr_, "cycle_min_lr", "cycle_max_lr");
  require(std::isfinite(decay_rate) && decay_rate >= 0, "decay_lr_rate", decay_rate, "a finite number >= 0");
  shape_.validate();
}

PerGroup OneCycleLr::lr(int64_t iteration) const {
  const double height = shape_.height(iteration);
  const double decay = 1 + decay_rate_ * shape_.decay_units(iteration);
  PerGroup rates(min_lr_.size());
  for (size_t g = 0; g < rates.size(); ++g) rates[g] = between(min_lr_[g], max_lr_[g], height) / decay;
  return rates;
}

OneCycleMomentum::OneCycleMomentum(PerGroup min_mom, PerGroup max_mom, double decay_rate, CycleShape shape)
    : min_mom_(std::move(min_mom)), max_mom_(std::move(max_mom)), decay_rate_(decay_rate), shape_(shape) {
  for (double mom : min_mom_) require(mom >= 0 && mom < 1, "cycle_min_mom", mom, ">= 0 and < 1");
  for (double mom : max_mom_) require(mom >= 0 && mom < 1, "cycle_max_mom", mom, ">= 0 and < 1");
  require_ordered(min_mom_, max_mom_, "cycle_min_mom", "cycle_max_mom");
  require(std::isfinite(decay_rate) && decay_rate >= 0, "decay_mom_rate", decay_rate, "a finite number >= 0");
  shape_.validate();
}

PerGroup OneCycleMomentum::momentum(int64_t iteration) const {
  const double depth = shape_.height(iteration);
  const double decay = 1 + decay_rate_ * shape_.decay_units(iteration);
  PerGroup momenta(min_mom_.size());
  for (size_t g = 0; g < momenta.size(); ++g) momenta[g] = between(max_mom_[g], min_mom_[g], depth) * decay;
  return momenta;
}

}  // namespace ds::optim

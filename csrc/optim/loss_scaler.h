// Loss scaling for fp16: how the scale moves with overflowing and clean steps.
#pragma once
#include <cstdint>

namespace ds::optim {

// The rules of a dynamic scale (Micikevicius et al. 2018, "Mixed precision training", section 3.2, with hysteresis):
// - after an overflow the scale is divided by `factor`, but not below `min_scale`; the first `hysteresis` - 1 overflows
//   since the hysteresis was full only use it up;
// - after `window` steps in a row without overflow the scale is multiplied by `factor` and the hysteresis refilled;
//   with `consecutive_hysteresis` every clean step refills it; of the steps since the start or an overflow the first
//   `settling` ones do not count (DeepSpeed's optimizers without ZeRO wait one step longer than its ZeRO optimizers);
// - an overflow that finds the scale at `min_scale` fails with ErrorKind::kRuntime if `raise_at_min`: the loss
//   itself is not finite, and training on would skip every step.
struct LossScaleRules {
  double factor = 2;
  int64_t window = 1000;
  double min_scale = 1;
  int64_t hysteresis = 1;
  bool consecutive_hysteresis = false;
  bool raise_at_min = true;
  int64_t settling = 0;

  // Fails with ErrorKind::kValue, naming the value.
  void validate() const;
};

// All that changes from step to step: a checkpoint needs nothing else.
struct LossScaleState {
  double scale = 65536;
  int64_t iteration = 0;  // steps seen, skipped ones included
  int64_t last_overflow_iteration = -1;
  int64_t hysteresis_left = 1;
};

// The state after one more step. Pure; a state at the floor that overflows fails as the rules say.
LossScaleState next_loss_scale(const LossScaleRules& rules, LossScaleState state, bool overflow);

}  // namespace ds::optim

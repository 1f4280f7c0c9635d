#include "optim/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace ds::optim {
namespace {

void require(bool ok, const char* name, double value, const char* allowed) {
  if (!ok) fail(ErrorKind::kValue, "loss scaler: ", name, " = ", value, " is not allowed: it must be ", allowed, ".");
}

}  // namespace

void LossScaleRules::validate() const {
  require(std::isfinite(factor) && factor > 1, "scale_factor", factor, "a finite number above 1");
  require(window >= 1, "scale_window", static_cast<double>(window), ">= 1");
  require(std::isfinite(min_scale) && min_scale > 0, "min_scale", min_scale, "a finite number above 0");
  require(hysteresis >= 1, "delayed_shift (hysteresis)", static_cast<double>(hysteresis), ">= 1");
  require(settling >= 0, "settling", static_cast<double>(settling), ">= 0");
}

LossScaleState next_loss_scale(const LossScaleRules& rules, LossScaleState state, bool overflow) {
  if (overflow) {
    if (rules.hysteresis > 1 && state.hysteresis_left > 1) {
      --state.hysteresis_left;
    } else {
      if (rules.raise_at_min && state.scale <= rules.min_scale)
        fail(ErrorKind::kRuntime, "the loss scale is at its minimum ", rules.min_scale,
             " and gradients still overflow: it cannot be lowered any further. The loss or a gradient is inf or nan by "
             "itself; look for the parameter named in the log, lower the learning rate, train in bf16, or lower "
             "fp16.min_loss_scale.");
      state.scale = std::max(state.scale / rules.factor, rules.min_scale);
    }
    state.last_overflow_iteration = state.iteration;
  } else {
    if (rules.consecutive_hysteresis) state.hysteresis_left = rules.hysteresis;
    const int64_t clean = state.iteration - state.last_overflow_iteration - rules.settling;
    if (clean > 0 && clean % rules.window == 0) {
      state.hysteresis_left = rules.hysteresis;
      const double raised = state.scale * rules.factor;
      if (std::isfinite(raised)) state.scale = raised;
    }
  }
  ++state.iteration;
  return state;
}

}  // namespace ds::optim

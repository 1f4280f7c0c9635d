// 1-bit Adam: kernels/onebit.h.
#include <algorithm>
#include <cmath>

#include "config/sections/optimizer_params.h"
#include "kernels/onebit.h"
#include "optim/rule.h"

namespace ds::optim {
namespace {

// Once the variance is frozen, so is its correction.
kernels::AdamArgs adam_args(const Values& h, double step) {
  const bool correct = h["bias_correction"] != 0;
  const double seen = std::min(step, std::max(1.0, h["freeze_step"]));
  return {h["lr"],
          h["beta1"],
          h["beta2"],
          h["eps"],
          h["weight_decay"],
          correct ? 1.0 - std::pow(h["beta1"], step) : 1.0,
          correct ? 1.0 - std::pow(h["beta2"], seen) : 1.0,
          true};
}

kernels::AdamConstants constants(const Values& h, double step) { return kernels::adam_constants(adam_args(h, step)); }

kernels::OneBitConstants frozen_constants(const Values& h, double step) {
  return kernels::onebit_constants({adam_args(h, step), false, 0});
}

Rule onebit_adam() {
  Rule rule = elementwise("onebit_adam", {"exp_avg", "exp_avg_sq"},
                          {{"lr", 1e-3},
                           {"beta1", 0.9},
                           {"beta2", 0.999},
                           {"eps", 1e-8},
                           {"weight_decay", 0},
                           {"bias_correction", 0},
                           {"freeze_step", 100000}},
                          &constants);
  rule.passes = {{"adam"}};
  Pass send = pass_with("onebit_send", &frozen_constants);
  send.exchanges = true;
  rule.phases.resize(2);
  rule.phases[0].passes = rule.passes;
  rule.phases[1].passes = {send, pass_with("onebit_take", &frozen_constants)};
  rule.phases[1].local = rule.phases[1].frozen = true;
  rule.phases[1].period = 1;
  rule.phase_of = [](const Values& h, int64_t update) {
    return static_cast<double>(update) > h["freeze_step"] ? 1 : 0;
  };
  return rule;
}

const Registration registration(onebit_adam());
const config::OptimizerType type("OneBitAdam");

}  // namespace
}  // namespace ds::optim

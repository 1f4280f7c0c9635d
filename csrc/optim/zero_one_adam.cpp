// 0/1 Adam: kernels/onebit.h, and zero_one_schedule.h for the steps at which something travels.
#include <algorithm>
#include <cmath>

#include "config/sections/optimizer_params.h"
#include "kernels/onebit.h"
#include "optim/rule.h"
#include "optim/zero_one_schedule.h"

namespace ds::optim {
namespace {

enum PhaseNumber : size_t { kVariance, kGradient, kLocal, kSync };

// Once the variance is frozen, so is its correction.
kernels::AdamArgs adam_args(const Values& h, double step) {
  const bool correct = h["bias_correction"] != 0;
  const double seen = std::min(step, std::max(1.0, h["var_freeze_step"]));
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

kernels::OneBitConstants gradient_constants(const Values& h, double step) {
  return kernels::onebit_constants({adam_args(h, step), true, 0});
}

kernels::OneBitConstants local_constants(const Values& h, double step) {
  return kernels::onebit_constants({adam_args(h, step), false, h["lr_sum"]});
}

size_t phase_of(const Values& h, int64_t update) {
  const auto whole = [&](const char* name) { return static_cast<int64_t>(h[name]); };
  const int64_t local = update - whole("var_freeze_step");
  if (local <= 0) return updates_variance(update, whole("var_update_scaler")) ? kVariance : kGradient;
  return syncs_weights(local, whole("local_step_scaler"), whole("local_step_clipper")) ? kSync : kLocal;
}

Rule zero_one_adam() {
  // lr_sum: of the steps since the ranks were last equal; the engine knows it.
  Rule rule = elementwise("zero_one_adam", {"exp_avg", "exp_avg_sq"},
                          {{"lr", 1e-3},
                           {"beta1", 0.9},
                           {"beta2", 0.999},
                           {"eps", 1e-8},
                           {"weight_decay", 0},
                           {"bias_correction", 0},
                           {"var_freeze_step", 100000},
                           {"var_update_scaler", 16},
                           {"local_step_scaler", 32678},
                           {"local_step_clipper", 16},
                           {"lr_sum", 0}},
                          &constants);
  rule.beside = {{"momentum_accumulator"}, {"last_common_weights", /*of_weights=*/true}};
  rule.passes = {{"adam"}};
  Pass gradient = pass_with("onebit_send", &gradient_constants), sync = pass_with("zero_one_send", &local_constants);
  gradient.exchanges = sync.exchanges = true;
  rule.phases.resize(4);
  for (size_t number : {kVariance, kGradient}) rule.phases[number].period = 1;
  for (size_t number : {kLocal, kSync}) {
    rule.phases[number].period = 2;
    rule.phases[number].beside = rule.phases[number].frozen = true;
  }
  for (size_t number : {kGradient, kLocal, kSync}) rule.phases[number].local = true;
  rule.phases[kVariance].passes = rule.passes;
  rule.phases[kGradient].passes = {gradient, pass_with("onebit_take", &gradient_constants)};
  rule.phases[kLocal].passes = {pass_with("zero_one_local", &local_constants)};
  rule.phases[kLocal].apart = true;
  rule.phases[kSync].passes = {sync, pass_with("zero_one_sync", &local_constants)};
  rule.phase_of = &phase_of;
  return rule;
}

const Registration registration(zero_one_adam());
const config::OptimizerType type("ZeroOneAdam");

}  // namespace
}  // namespace ds::optim

// 1-bit LAMB: kernels/onebit_lamb.h.
#include "kernels/onebit_lamb.h"

#include <algorithm>
#include <cmath>

#include "config/sections/optimizer_params.h"
#include "optim/rule.h"

namespace ds::optim {
namespace {

enum PhaseNumber : size_t { kWarmUp, kFirst, kFrozen };

// Once the variance is frozen, so is its correction.
kernels::LambConstants lamb_constants(const Values& h, double step) {
  const bool correct = h["bias_correction"] != 0;
  const double seen = std::min(step, std::max(1.0, h["freeze_step"]));
  return kernels::lamb_constants(
      {h["lr"], h["beta1"], h["beta2"], h["eps"], h["weight_decay"], correct ? 1.0 - std::pow(h["beta1"], step) : 1.0,
       correct ? 1.0 - std::pow(h["beta2"], seen) : 1.0, h["eps_inside_sqrt"] != 0, h["min_coeff"], h["max_coeff"]});
}

template <bool kBegins>
kernels::OneBitLambConstants constants(const Values& h, double step) {
  return {lamb_constants(h, step), h["coeff_beta"], h["factor_min"], h["factor_max"], h["factor_threshold"], kBegins};
}

template <bool kBegins>
std::vector<Pass> frozen() {
  std::vector<Pass> passes;
  for (const char* kernel : {"onebit_lamb_send", "onebit_lamb_moments", "onebit_lamb_factor", "onebit_lamb"})
    passes.push_back(pass_with(kernel, &constants<kBegins>));
  passes[0].exchanges = true;
  return passes;
}

Rule onebit_lamb() {
  Rule rule = elementwise("onebit_lamb", {"exp_avg", "exp_avg_sq", "exp_avg_sq_fresh"},
                          {{"lr", 1e-3},
                           {"beta1", 0.9},
                           {"beta2", 0.999},
                           {"eps", 1e-8},
                           {"weight_decay", 0},
                           {"bias_correction", 0},
                           {"eps_inside_sqrt", 0},
                           {"min_coeff", 0.01},
                           {"max_coeff", 10},
                           {"freeze_step", 100000},
                           {"coeff_beta", 0.9},
                           {"factor_max", 4},
                           {"factor_min", 0.5},
                           {"factor_threshold", 0.1}},
                          &constants<false>);
  rule.sums = kernels::onebit_lamb::kNumbers;
  rule.kept = {{"lamb_coeff_freeze", 0}, {"scaling_coeff", 1}, {"last_factor", 1}};
  rule.scaling = kernels::onebit_lamb::kScaling;
  rule.one_scale = true;
  Pass moments = pass_with("lamb_moments", &lamb_constants);
  moments.adds_sums = true;
  rule.passes = {moments, pass_with("onebit_lamb_coeff", &constants<false>), pass_with("lamb", &lamb_constants)};
  Pass size = pass_with("onebit_lamb_size", &constants<true>);
  size.evens_out = true;
  rule.phases.resize(3);
  rule.phases[kWarmUp].passes = rule.passes;
  rule.phases[kFirst].passes = frozen<true>();
  rule.phases[kFirst].passes.insert(rule.phases[kFirst].passes.begin(), size);
  rule.phases[kFrozen].passes = frozen<false>();
  for (size_t number : {kFirst, kFrozen}) {
    rule.phases[number].local = rule.phases[number].frozen = true;
    rule.phases[number].period = 1;
  }
  rule.phase_of = [](const Values& h, int64_t update) -> size_t {
    const double after = static_cast<double>(update) - h["freeze_step"];
    return after <= 0 ? kWarmUp : after <= 1 ? kFirst : kFrozen;
  };
  return rule;
}

const Registration registration(onebit_lamb());
const config::OptimizerType type("OneBitLamb");

}  // namespace
}  // namespace ds::optim

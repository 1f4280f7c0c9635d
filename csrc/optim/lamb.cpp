// LAMB: kernels/lamb.h.
#include "kernels/lamb.h"

#include <cmath>

#include "config/sections/optimizer_params.h"
#include "optim/rule.h"

namespace ds::optim {
namespace {

kernels::LambConstants constants(const Values& h, double step) {
  const bool correct = h["bias_correction"] != 0;
  return kernels::lamb_constants(
      {h["lr"], h["beta1"], h["beta2"], h["eps"], h["weight_decay"], correct ? 1.0 - std::pow(h["beta1"], step) : 1.0,
       correct ? 1.0 - std::pow(h["beta2"], step) : 1.0, h["eps_inside_sqrt"] != 0, h["min_coeff"], h["max_coeff"]});
}

Rule lamb() {
  Rule rule = elementwise("lamb", {"exp_avg", "exp_avg_sq"},
                          {{"lr", 1e-3},
                           {"beta1", 0.9},
                           {"beta2", 0.999},
                           {"eps", 1e-8},
                           {"weight_decay", 0},
                           {"bias_correction", 1},
                           {"eps_inside_sqrt", 0},
                           {"min_coeff", 0.01},
                           {"max_coeff", 10}},
                          &constants);
  rule.passes = {{"lamb_moments", /*adds_sums=*/true}, {"lamb"}};
  rule.sums = kernels::kLambSums;
  return rule;
}

const Registration registration(lamb());
const config::OptimizerType type("Lamb");

}  // namespace
}  // namespace ds::optim

// Adam and AdamW: kernels/adam.h.
#include "kernels/adam.h"

#include <cmath>

#include "optim/rule.h"

namespace ds::optim {
namespace {

kernels::AdamConstants constants(const Values& h, double step) {
  const bool correct = h["bias_correction"] != 0;
  return kernels::adam_constants({h["lr"], h["beta1"], h["beta2"], h["eps"], h["weight_decay"],
                                  correct ? 1.0 - std::pow(h["beta1"], step) : 1.0,
                                  correct ? 1.0 - std::pow(h["beta2"], step) : 1.0, h["decoupled"] != 0});
}

const std::vector<Hyperparameter> kHyper = {{"lr", 1e-3},    {"beta1", 0.9},      {"beta2", 0.999},
                                            {"eps", 1e-8},   {"weight_decay", 0}, {"bias_correction", 1},
                                            {"decoupled", 1}};

const Registration registration(elementwise("adam", {"exp_avg", "exp_avg_sq"}, kHyper, &constants));

// Adam with 8-bit states, outside of engines: kernels/code_book.h.
Rule packed() {
  Rule rule = elementwise("adam8bit", {"exp_avg", "exp_avg_sq", "exp_avg_max", "exp_avg_sq_max"}, kHyper, &constants);
  rule.packed = true;
  return rule;
}
const Registration registration_8bit(packed());

}  // namespace
}  // namespace ds::optim

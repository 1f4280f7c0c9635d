// Adagrad: kernels/adagrad.h.
#include "kernels/adagrad.h"

#include "config/sections/optimizer_params.h"
#include "optim/rule.h"

namespace ds::optim {
namespace {

kernels::AdagradConstants constants(const Values& h, double) {
  return {static_cast<float>(h["lr"]), static_cast<float>(h["eps"]), static_cast<float>(h["weight_decay"])};
}

const Registration registration(elementwise("adagrad", {"exp_avg_sq"},
                                            {{"lr", 1e-2}, {"eps", 1e-10}, {"weight_decay", 0}}, &constants));

using namespace config::optimizer_field;
const config::OptimizerType type("Adagrad",
                                 {lr(0.01), eps(1e-10), weight_decay(), amsgrad(), fp32_states(), max_grad_norm()});

}  // namespace
}  // namespace ds::optim

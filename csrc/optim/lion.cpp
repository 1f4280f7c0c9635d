// Lion: kernels/lion.h.
#include "kernels/lion.h"

#include "config/sections/optimizer_params.h"
#include "optim/rule.h"

namespace ds::optim {
namespace {

kernels::LionConstants constants(const Values& h, double) {
  return {static_cast<float>(h["lr"]), static_cast<float>(h["lr"] * h["weight_decay"]),
          static_cast<float>(1.0 - h["beta1"]), static_cast<float>(1.0 - h["beta2"])};
}

const Registration registration(elementwise("lion", {"exp_avg"},
                                            {{"lr", 1e-3}, {"beta1", 0.9}, {"beta2", 0.999}, {"weight_decay", 0}},
                                            &constants));

using namespace config::optimizer_field;
const config::OptimizerType type("Lion",
                                 {lr(), betas(), weight_decay(), set_grad_none(), fp32_states(), max_grad_norm()});

}  // namespace
}  // namespace ds::optim

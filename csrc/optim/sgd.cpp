// SGD with momentum: kernels/sgd.h. "SGD" in a configuration is torch's class; ours is made by hand.
#include "kernels/sgd.h"

#include "optim/rule.h"

namespace ds::optim {
namespace {

kernels::SgdConstants constants(const Values& h, double step) {
  kernels::SgdConstants c;
  c.lr = static_cast<float>(h["lr"]);
  c.weight_decay = static_cast<float>(h["weight_decay"]);
  c.gain = static_cast<float>(step > 1 ? 1.0 - h["dampening"] : 1.0);
  c.leak = static_cast<float>(1.0 - h["momentum"]);
  c.look_ahead = static_cast<float>(h["nesterov"] != 0 ? h["momentum"] : 0.0);
  c.buffered = h["momentum"] != 0;
  return c;
}

const Registration registration(
    elementwise("sgd", {"momentum_buffer"},
                {{"lr", 1e-3}, {"momentum", 0}, {"dampening", 0}, {"weight_decay", 0}, {"nesterov", 0}}, &constants));

}  // namespace
}  // namespace ds::optim

// Plain loops of SGD.
#include "kernels/sgd.h"

#include "kernels/ref/update.h"

namespace ds::kernels::ref {
namespace {

void sgd(float& p, float* s, float g, const void* constants) {
  const auto& c = *static_cast<const SgdConstants*>(constants);
  g = g + c.weight_decay * p;
  if (c.buffered) {
    s[0] = s[0] + (c.gain * g - c.leak * s[0]);
    g = c.look_ahead != 0 ? g + c.look_ahead * s[0] : s[0];
  }
  p = p - c.lr * g;
}

const Registration registration("sgd", &sgd);

}  // namespace
}  // namespace ds::kernels::ref

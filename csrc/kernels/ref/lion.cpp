// Plain loops of Lion.
#include "kernels/lion.h"

#include <cmath>

#include "kernels/ref/update.h"

namespace ds::kernels::ref {
namespace {

void lion(float& p, float* s, float g, const void* constants) {
  const auto& k = *static_cast<const LionConstants*>(constants);
  const float c = s[0] + k.move1 * (g - s[0]);
  const float sign = std::isnan(c) ? c : c > 0 ? 1.0f : c < 0 ? -1.0f : 0.0f;
  p = p - (k.lr * sign + k.decay * p);
  s[0] = s[0] + k.move2 * (g - s[0]);
}

const Registration registration("lion", &lion);

}  // namespace
}  // namespace ds::kernels::ref

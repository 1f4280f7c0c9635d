// Plain loops of Adam and AdamW.
#include "kernels/adam.h"

#include "kernels/ref/update.h"

namespace ds::kernels::ref {
namespace {

void adam(float& p, float* s, float g, const void* constants) {
  const auto& c = *static_cast<const AdamConstants*>(constants);
  float &m = s[0], &v = s[1];
  g = g + c.decay_grad * p;
  m = m + c.move1 * (g - m);
  v = v + c.move2 * (g * g - v);
  float d = c.step_size * m / (std::sqrt(v) * c.inv_sqrt_correct + c.eps);
  d = d + c.decay_param * p;
  p = p - d;
}

const Registration registration("adam", &adam);

}  // namespace
}  // namespace ds::kernels::ref

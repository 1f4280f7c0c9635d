// Plain loops of Adagrad.
#include "kernels/adagrad.h"

#include <cmath>

#include "kernels/ref/update.h"

namespace ds::kernels::ref {
namespace {

void adagrad(float& p, float* s, float g, const void* constants) {
  const auto& c = *static_cast<const AdagradConstants*>(constants);
  g = g + c.weight_decay * p;
  s[0] = s[0] + g * g;
  p = p - c.lr * g / (std::sqrt(s[0]) + c.eps);
}

const Registration registration("adagrad", &adagrad);

}  // namespace
}  // namespace ds::kernels::ref

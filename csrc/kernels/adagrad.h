// Adagrad (Duchi, Hazan & Singer 2011, diagonal form), the update kernel "adagrad". State: 0 sum of squared gradients.
//
// Per element, in fp32; with g = grad * scale->grad_scale:
//   g += weight_decay * p
//   s += g * g
//   p -= lr * g / (sqrt(s) + eps)
#pragma once

namespace ds::kernels {

struct AdagradConstants {
  float lr, eps, weight_decay;
};

}  // namespace ds::kernels

// Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", program 1), the update kernel "lion".
// State: 0 the momentum.
//
// Per element, in fp32; with g = grad * scale->grad_scale and the old m on the right:
//   c  = m + (1 - beta1) * (g - m)
//   p -= lr * sign(c) + lr * weight_decay * p            sign(0) = 0, sign(nan) = nan
//   m += (1 - beta2) * (g - m)
// The moving form, because a beta rounded to fp32 would bias the momentum (kernels/adam.h).
#pragma once

namespace ds::kernels {

struct LionConstants {
  float lr, decay;     // decay: lr * weight_decay
  float move1, move2;  // 1 - beta
};

}  // namespace ds::kernels

// Stochastic gradient descent with momentum (Sutskever et al. 2013), the update kernel "sgd". State: 0 momentum buffer.
//
// Per element, in fp32; with g = grad * scale->grad_scale:
//   g += weight_decay * p
//   momentum not 0:  b += (1 - dampening) * g - (1 - momentum) * b,  with dampening 0 at the first update
//                    g = nesterov ? g + momentum * b : b
//   p -= lr * g
// The buffer leaks 1 - momentum of itself instead of being multiplied by a momentum that fp32 has rounded.
#pragma once

namespace ds::kernels {

struct SgdConstants {
  float lr, weight_decay;
  float gain, leak;  // 1 - dampening, 1 - momentum
  float look_ahead;  // momentum with Nesterov's form, else 0
  int buffered;      // momentum is not 0
};

}  // namespace ds::kernels

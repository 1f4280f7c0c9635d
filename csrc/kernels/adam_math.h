// The constants of one Adam step, rounded to fp32 in one place so that every body uses the same ones.
#pragma once
#include <cmath>

#include "kernels/adam.h"
#include "kernels/norm.h"

namespace ds::kernels {

struct AdamConstants {
  float grad_scale;
  float decay_grad;        // adamw false: g += decay_grad * p
  float decay_param;       // adamw true: d += decay_param * p
  float move1, move2;      // 1 - beta
  float step_size;         // lr / bias_correction1
  float inv_sqrt_correct;  // 1 / sqrt(bias_correction2)
  float eps;
};

inline AdamConstants adam_constants(const AdamArgs& a, float grad_scale) {
  AdamConstants c;
  c.grad_scale = grad_scale;
  c.decay_grad = static_cast<float>(a.adamw ? 0.0 : a.weight_decay);
  c.decay_param = static_cast<float>(a.adamw ? a.lr * a.weight_decay : 0.0);
  c.move1 = static_cast<float>(1.0 - a.beta1);
  c.move2 = static_cast<float>(1.0 - a.beta2);
  c.step_size = static_cast<float>(a.lr / a.bias_correction1);
  c.inv_sqrt_correct = static_cast<float>(1.0 / std::sqrt(a.bias_correction2));
  c.eps = static_cast<float>(a.eps);
  return c;
}

}  // namespace ds::kernels

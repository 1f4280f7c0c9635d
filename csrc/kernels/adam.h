// Adam and AdamW (Kingma & Ba 2015; decoupled decay: Loshchilov & Hutter 2019), the update kernel "adam".
// States: 0 first moment, 1 second moment.
//
// Per element, in fp32; with g = grad * scale->grad_scale, w = weight_decay, c1 = bias_correction1,
// c2 = bias_correction2:
//   adamw false:  g += w * p
//   m += (1 - beta1) * (g - m)
//   v += (1 - beta2) * (g * g - v)
//   d  = lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)          adamw true: d += lr * w * p
//   p -= d
// The moments move towards their input instead of adding beta * old + (1 - beta) * new: a beta rounded to fp32 would
// otherwise bias v by up to 1e-5. The update d is summed first and subtracted once, which halves the rounding of p.
#pragma once
#include <cmath>

namespace ds::kernels {

struct AdamArgs {
  double lr, beta1, beta2, eps, weight_decay;  // fp64, because 1 - beta2 of an fp32 beta2 is off by 5e-5
  double bias_correction1, bias_correction2;   // 1 - beta^step, or 1 where bias correction is off
  bool adamw;                                  // true: decoupled decay; false: decay goes through the moments
};

// The block of UpdateArgs::constants: rounded to fp32 in one place so that every body uses the same ones.
struct AdamConstants {
  float decay_grad;        // adamw false: g += decay_grad * p
  float decay_param;       // adamw true: d += decay_param * p
  float move1, move2;      // 1 - beta
  float step_size;         // lr / bias_correction1
  float inv_sqrt_correct;  // 1 / sqrt(bias_correction2)
  float eps;
};

inline AdamConstants adam_constants(const AdamArgs& a) {
  AdamConstants c;
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

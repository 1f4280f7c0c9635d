// LAMB: Adam's direction with decoupled decay, its length set for each parameter by a trust ratio (You et al. 2020,
// "Large Batch Optimization for Deep Learning"), in the arithmetic of the published FusedLamb: the moments in the
// direction are raw, and bias correction is a factor of the rate, outside the ratio. (Algorithm 2 of the paper corrects
// the moments inside the direction, where the ratio takes the correction out again.) States: 0 first moment, 1 second
// moment.
//
// The ratio needs norms over whole parameters, of which a rank may hold a part, so a step has two passes:
// "lamb_moments" updates the states and adds to the parameter's sums; when the sums were added up over the ranks,
// "lamb" updates the weights. The direction u is computed again there, from the same numbers in the same way, which
// reads and writes no more bytes than storing it would.
//
// Per element, in fp32; with g = grad * scale->grad_scale, rate = lr * sqrt(bias_correction2) / bias_correction1:
//   m += (1 - beta1) * (g - m)
//   v += (1 - beta2) * (g * g - v)
//   u  = m / (sqrt(v) + eps)                      eps_inside_sqrt: m / sqrt(v + eps)
//   u += weight_decay * p
//   p -= rate * ratio * u
// UpdateSegment::sums: 0 the sum of squares of p before the update, 1 that of u, added up in fp64 in an order that
// depends on the segments alone (kernels/sum_order.h). At most one segment of a call for each parameter.
#pragma once
#include <cmath>

#include "kernels/host_device.h"

namespace ds::kernels {

constexpr int kLambSums = 2;

struct LambArgs {
  double lr, beta1, beta2, eps, weight_decay;
  double bias_correction1, bias_correction2;  // 1 - beta^step, or 1 where bias correction is off
  bool eps_inside_sqrt;
  double min_ratio, max_ratio;
};

// The block of UpdateArgs::constants: rounded to fp32 in one place so that every body uses the same ones.
struct LambConstants {
  float move1, move2;             // 1 - beta
  float eps_inside, eps_outside;  // of the root; one of them is 0
  float decay;
  float rate;  // lr * sqrt(bias_correction2) / bias_correction1
  double min_ratio, max_ratio;
};

inline LambConstants lamb_constants(const LambArgs& a) {
  LambConstants c;
  c.move1 = static_cast<float>(1.0 - a.beta1);
  c.move2 = static_cast<float>(1.0 - a.beta2);
  c.eps_inside = static_cast<float>(a.eps_inside_sqrt ? a.eps : 0.0);
  c.eps_outside = static_cast<float>(a.eps_inside_sqrt ? 0.0 : a.eps);
  c.decay = static_cast<float>(a.weight_decay);
  c.rate = static_cast<float>(a.lr * std::sqrt(a.bias_correction2) / a.bias_correction1);
  c.min_ratio = a.min_ratio;
  c.max_ratio = a.max_ratio;
  return c;
}

// clamp(|p| / |u|, min_ratio, max_ratio), and 1 where one of the two is zero; a nan stays one.
DS_HOST_DEVICE static inline double lamb_ratio(const double* sums, double min_ratio, double max_ratio) {
  if (sums[0] == 0 || sums[1] == 0) return 1;
  const double ratio = std::sqrt(sums[0]) / std::sqrt(sums[1]);
  return ratio < min_ratio ? min_ratio : ratio > max_ratio ? max_ratio : ratio;
}

}  // namespace ds::kernels

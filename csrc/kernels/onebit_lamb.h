// LAMB whose ranks exchange signs instead of gradients once its variance is frozen: 1-bit LAMB (Li et al. 2021, arXiv
// 2104.06069). Until then a step is LAMB's (kernels/lamb.h), and "onebit_lamb_coeff" averages the ratio of each
// parameter. Later the ratio is that average times a bounded factor, which a fresh variance gives. The fresh variance
// is rebuilt from the moments, since the ranks have no common gradient. States: 0 first moment, 1 second moment, frozen
// later, 2 the fresh second moment.
//
// Per element, in fp32; with g = grad * scale->grad_scale, root(v) = sqrt(v) + eps and z = sums[kScaling]:
//   onebit_lamb_size:     sums[0] += m * m
//   onebit_lamb_send:     x = (m + (1 - beta1) * (g - m)) * z
//   onebit_lamb_moments:  n = x / z
//                         h = m + (n - m) / (1 - beta1)
//                         f += (1 - beta2) * (h * h - f)         begins: f starts from v
//                         m = n
//                         sums[0] += (m / root(v))^2
//                         sums[1] += (m / root(v) + weight_decay * p)^2
//                         sums[2] = max(sums[2], root(v) / root(f))
//   onebit_lamb:          p -= rate * sums[kRatio] * (m / root(v) + weight_decay * p)
// Once for each parameter, in fp64:
//   onebit_lamb_coeff:    sums[kRatio] = lamb_ratio(sums)
//                         sums[kCoeff] = coeff_beta * sums[kCoeff] + (1 - coeff_beta) * sums[kRatio]
//   onebit_lamb_factor:   factor_of_lamb()
#pragma once
#include "kernels/lamb.h"

namespace ds::kernels {

// Numbers of a parameter behind the two of LAMB. The last three stay from step to step.
namespace onebit_lamb {
constexpr int kRatio = 2, kCoeff = 3, kScaling = 4, kLast = 5, kNumbers = 6;
}  // namespace onebit_lamb

struct OneBitLambConstants {
  LambConstants lamb;
  double coeff_beta, factor_min, factor_max, factor_threshold;
  bool begins;  // the first step after the freeze
};

DS_HOST_DEVICE static inline double bounded(double value, double least, double most) {
  return value < least ? least : value > most ? most : value;
}

// The factor of this step from the sums of "onebit_lamb_moments", and with it the ratio.
DS_HOST_DEVICE static inline void factor_of_lamb(double* sums, const OneBitLambConstants& c) {
  double factor = sums[2];
  if (c.lamb.decay > 0) {
    const double share = sums[1] == 0 ? 1.0 : bounded(std::sqrt(sums[0]) / std::sqrt(sums[1]), 0.0, 1.0);
    factor = factor * share + (1.0 - share);
  }
  factor = bounded(factor, c.factor_min, c.factor_max);
  const double last = sums[onebit_lamb::kLast];
  factor = bounded(factor, last * (1.0 - c.factor_threshold), last * (1.0 + c.factor_threshold));
  sums[onebit_lamb::kLast] = factor;
  sums[onebit_lamb::kRatio] = sums[onebit_lamb::kCoeff] * factor;
}

DS_HOST_DEVICE static inline void average_lamb_ratio(double* sums, const OneBitLambConstants& c) {
  const double ratio = lamb_ratio(sums, c.lamb.min_ratio, c.lamb.max_ratio);
  sums[onebit_lamb::kRatio] = ratio;
  sums[onebit_lamb::kCoeff] = c.coeff_beta * sums[onebit_lamb::kCoeff] + (1.0 - c.coeff_beta) * ratio;
}

}  // namespace ds::kernels

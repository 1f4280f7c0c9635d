// Adam whose ranks exchange signs instead of gradients once its variance is frozen: 1-bit Adam (Tang et al. 2021, arXiv
// 2102.02888) and 0/1 Adam (Lu et al. 2022, arXiv 2202.06009). The exchange (csrc/comm/compressed/sign_exchange.h)
// comes between two passes: the first one writes what a rank sends to UpdateSegment::scratch, where the second one
// finds what all ranks have received. Before the freeze both are the kernel "adam" (kernels/adam.h).
// States: 0 first moment, 1 second moment, 2 the sum of the updates since the ranks were last equal, 3 the weights that
// they had then.
//
// Per element, in fp32; with g = grad * scale->grad_scale, c1 and c2 as in adam.h,
// root = sqrt(v) / sqrt(c2) + eps and d = lr / c1 * m / root + lr * weight_decay * p:
//   onebit_send:     x = m + (1 - beta1) * (g - m)            gradients: x = g
//   onebit_take:     m = x                                    gradients: m += (1 - beta1) * (x - m)
//                    p -= d
//   zero_one_local:  m += (1 - beta1) * (g - m)
//                    p -= d
//                    u -= d
//   zero_one_send:   the same, and then x = u * root
//   zero_one_sync:   m = -(x / lr_sum)                        lr_sum 0: m stays
//                    p = w + x / root
//                    w = p
//                    u = 0
#pragma once
#include "kernels/adam.h"

namespace ds::kernels {

struct OneBitArgs {
  AdamArgs adam;
  bool gradients;  // those travel, and not moments
  double lr_sum;   // of lr / c1, over the steps since the ranks were last equal, this one included
};

// The block of UpdateArgs::constants: rounded to fp32 in one place so that every body uses the same ones.
struct OneBitConstants {
  float move1;             // 1 - beta1
  float step_size;         // lr / bias_correction1
  float decay;             // lr * weight_decay
  float inv_sqrt_correct;  // 1 / sqrt(bias_correction2)
  float eps;
  float lr_sum;
  bool gradients;
};

inline OneBitConstants onebit_constants(const OneBitArgs& a) {
  const AdamConstants adam = adam_constants(a.adam);
  return {adam.move1, adam.step_size, adam.decay_param, adam.inv_sqrt_correct, adam.eps, static_cast<float>(a.lr_sum),
          a.gradients};
}

}  // namespace ds::kernels

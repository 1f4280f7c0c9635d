// Adam and AdamW over many tensors in one call (Kingma & Ba 2015; decoupled decay: Loshchilov & Hutter 2019).
//
// Per element, in fp32, each line rounded once, no fused multiply-add, so that every instruction set and device gives
// the same bits; with g = grad * scale->grad_scale, w = weight_decay, c1 = bias_correction1, c2 = bias_correction2:
//   adamw false:  g += w * p
//   m += (1 - beta1) * (g - m)
//   v += (1 - beta2) * (g * g - v)
//   d  = lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)          adamw true: d += lr * w * p
//   p -= d
// The moments move towards their input instead of adding beta * old + (1 - beta) * new: a beta rounded to fp32 would
// otherwise bias v by up to 1e-5. The update d is summed first and subtracted once, which halves the rounding of p.
#pragma once
#include "kernels/launch.h"

namespace ds::kernels {

// One run of consecutive elements of a parameter and its optimizer state.
struct AdamSegment {
  void* master;      // of AdamArgs::master_dtype: the weights, updated in place
  void* exp_avg;     // of AdamArgs::state_dtype: first moment
  void* exp_avg_sq;  // of AdamArgs::state_dtype: second moment
  const void* grad;  // of AdamArgs::grad_dtype
  void* lp;          // low-precision copy to write, of AdamArgs::lp_dtype; null: none
  size_t numel;
};

struct AdamArgs {
  double lr, beta1, beta2, eps, weight_decay;  // fp64, because 1 - beta2 of an fp32 beta2 is off by 5e-5
  double bias_correction1, bias_correction2;   // 1 - beta^step, or 1 where bias correction is off
  bool adamw;                                  // true: decoupled decay; false: decay goes through the moments
  DType grad_dtype, lp_dtype;
  // Anything but fp32 here is widened, updated in fp32 and rounded back (once per step, to nearest even).
  DType master_dtype = DType::kF32, state_dtype = DType::kF32;
};

}  // namespace ds::kernels

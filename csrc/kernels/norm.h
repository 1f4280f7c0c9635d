// The result of a gradient norm and what to do with it; lives in device memory, written by `finish_norm`.
#pragma once
#include <cstdint>

namespace ds::kernels {

struct StepScale {
  double norm;       // 2-norm of the true (unscaled) gradients; inf or nan when they are not finite
  float grad_scale;  // what each stored gradient is multiplied by: unscaling and clipping in one factor
  int32_t skip;      // 1: gradients are not finite, the update must not touch anything
};

}  // namespace ds::kernels

// The result of a gradient norm and what to do with it; lives in device memory, written by `finish_norm`.
#pragma once
#include <cstdint>

namespace ds::kernels {

struct StepScale {
  double norm;       // 2-norm of the true (unscaled) gradients; inf or nan when they are not finite
  float grad_scale;  // factor of each stored gradient: unscaling and clipping in one
  int32_t skip;      // not 0: the update must not touch anything; one of the two below
};

constexpr int32_t kSkipNotFinite = 1;  // gradients are inf or nan
constexpr int32_t kSkipFailed = 2;     // some rank could not compute them or their norm

}  // namespace ds::kernels

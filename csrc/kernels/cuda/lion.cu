// Lion: the formulas of kernels/lion.h.
#include "kernels/cuda/update.cuh"
#include "kernels/lion.h"

namespace ds::kernels::cuda {

struct Lion {
  using Constants = LionConstants;
  static constexpr int kStates = 1;

  static __device__ void step(float& p, float* s, float g, const Constants& k) {
    const float c = s[0] + k.move1 * (g - s[0]);
    const float sign = isnan(c) ? c : c > 0 ? 1.0f : c < 0 ? -1.0f : 0.0f;
    p = p - (k.lr * sign + k.decay * p);
    s[0] = s[0] + k.move2 * (g - s[0]);
  }
};

DS_CUDA_UPDATE("lion", Lion);

}  // namespace ds::kernels::cuda

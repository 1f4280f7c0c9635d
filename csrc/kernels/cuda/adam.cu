// Adam: the formulas of kernels/adam.h, operation by operation (and --fmad=false), so that the bits are those of the
// CPU.
#include "kernels/adam.h"
#include "kernels/cuda/update.cuh"

namespace ds::kernels::cuda {

struct Adam {
  using Constants = AdamConstants;
  static constexpr int kStates = 2;

  static __device__ void step(float& p, float* s, float g, const Constants& c) {
    float &m = s[0], &v = s[1];
    g = g + c.decay_grad * p;
    m = m + c.move1 * (g - m);
    v = v + c.move2 * (g * g - v);
    float d = c.step_size * m / (sqrtf(v) * c.inv_sqrt_correct + c.eps);
    d = d + c.decay_param * p;
    p = p - d;
  }
};

DS_CUDA_UPDATE("adam", Adam);

}  // namespace ds::kernels::cuda

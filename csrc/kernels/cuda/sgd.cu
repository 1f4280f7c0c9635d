// SGD: the formulas of kernels/sgd.h.
#include "kernels/cuda/update.cuh"
#include "kernels/sgd.h"

namespace ds::kernels::cuda {

struct Sgd {
  using Constants = SgdConstants;
  static constexpr int kStates = 1;

  static __device__ void step(float& p, float* s, float g, const Constants& c) {
    g = g + c.weight_decay * p;
    if (c.buffered) {
      s[0] = s[0] + (c.gain * g - c.leak * s[0]);
      g = c.look_ahead != 0 ? g + c.look_ahead * s[0] : s[0];
    }
    p = p - c.lr * g;
  }
};

DS_CUDA_UPDATE("sgd", Sgd);

}  // namespace ds::kernels::cuda

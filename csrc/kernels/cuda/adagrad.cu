// Adagrad: the formulas of kernels/adagrad.h.
#include "kernels/adagrad.h"
#include "kernels/cuda/update.cuh"

namespace ds::kernels::cuda {

struct Adagrad {
  using Constants = AdagradConstants;
  static constexpr int kStates = 1;

  static __device__ void step(float& p, float* s, float g, const Constants& c) {
    g = g + c.weight_decay * p;
    s[0] = s[0] + g * g;
    p = p - c.lr * g / (sqrtf(s[0]) + c.eps);
  }
};

DS_CUDA_UPDATE("adagrad", Adagrad);

}  // namespace ds::kernels::cuda

// Adam on 8-bit states ([Note: 8-bit states] in kernels/code_book.h): a thread block of 256 updates one block of 256.
#include "kernels/adam.h"
#include "kernels/code_book.h"
#include "kernels/cuda/update.cuh"

namespace ds::kernels::cuda {
namespace {

constexpr int kLanes = static_cast<int>(kCodeBlock);
__device__ constexpr CodeBook kBooks[2] = {make_code_book(true), make_code_book(false)};

struct Part {
  void* master;
  const void* grad;
  void* lp;
  unsigned char* codes[2];
  float* maxima[2];
  size_t numel;
  unsigned end;  // number of blocks up to and including this part
};

struct List {
  static constexpr int kMax = 3600 / sizeof(Part);
  Part parts[kMax];
  int count;
};

// The larger of two absolute values; NaN where one is NaN.
__device__ float larger(float a, float b) { return isnan(a) || a > b ? a : b; }

__device__ float max_of_block(float x, float* shared) {
  shared[threadIdx.x] = fabsf(x);
  __syncthreads();
  for (int width = kLanes / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) shared[threadIdx.x] = larger(shared[threadIdx.x], shared[threadIdx.x + width]);
    __syncthreads();
  }
  const float most = shared[0];
  __syncthreads();
  return most;
}

__global__ void __launch_bounds__(kLanes)
    adam8bit_kernel(const __grid_constant__ List list, UpdateDtypes t, AdamConstants c, const StepScale* scale) {
  DS_SHARED(float, shared, [kLanes]);
  float grad_scale = 1.0f;
  if (scale != nullptr) {
    if (scale->skip) return;
    grad_scale = scale->grad_scale;
  }
  int s = 0;
  for (int high = list.count - 1; s < high;) {  // the first part that ends behind this block
    const int middle = (s + high) / 2;
    if (blockIdx.x < list.parts[middle].end) {
      high = middle;
    } else {
      s = middle + 1;
    }
  }
  const Part& part = list.parts[s];
  const size_t block = blockIdx.x - (s == 0 ? 0 : list.parts[s - 1].end);
  const size_t i = block * kLanes + threadIdx.x;
  const bool mine = i < part.numel;
  float state[2] = {0, 0};
  if (mine) {
    float p[1], g[1];
    load(part.master, t.master, i, p);
    load(part.grad, t.grad, i, g);
    for (int k = 0; k < 2; ++k) state[k] = kBooks[k].values[part.codes[k][i]] * part.maxima[k][block];
    float &m = state[0], &v = state[1];
    float x = g[0] * grad_scale;
    x = x + c.decay_grad * p[0];
    m = m + c.move1 * (x - m);
    v = v + c.move2 * (x * x - v);
    float d = c.step_size * m / (sqrtf(v) * c.inv_sqrt_correct + c.eps);
    d = d + c.decay_param * p[0];
    p[0] = p[0] - d;
    store(part.master, t.master, i, p);
    if (part.lp != nullptr) store(part.lp, t.lp, i, p);
  }
  for (int k = 0; k < 2; ++k) {
    const float most = max_of_block(state[k], shared);
    if (mine) part.codes[k][i] = code_of(kBooks[k], most > 0 && isfinite(most) ? state[k] / most : 0.0f);
    if (threadIdx.x == 0) part.maxima[k][block] = most;
  }
}

void adam8bit(const Launch& launch, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
              const StepScale* scale) {
  const auto constants = *static_cast<const AdamConstants*>(args.constants);
  const UpdateDtypes dtypes = {args.master_dtype, args.state_dtype, args.grad_dtype, args.lp_dtype, false, 0};
  for (size_t s = 0; s < count;) {
    List list;
    list.count = 0;
    size_t blocks = 0;
    for (; s < count && list.count < List::kMax; ++s) {
      const UpdateSegment& seg = segments[s];
      if (seg.numel == 0) continue;
      if (list.count > 0 && blocks + code_blocks(seg.numel) > 0x7fffffff) break;
      Part& part = list.parts[list.count++];
      part.master = seg.master;
      part.grad = seg.grad;
      part.lp = seg.lp;
      for (int k = 0; k < 2; ++k) {
        part.codes[k] = static_cast<unsigned char*>(seg.states[k]);
        part.maxima[k] = static_cast<float*>(seg.states[2 + k]);
      }
      part.numel = seg.numel;
      blocks += code_blocks(seg.numel);
      part.end = static_cast<unsigned>(blocks);
    }
    if (list.count == 0) break;
    launch_kernel(launch, &adam8bit_kernel, static_cast<unsigned>(blocks), kLanes, 0, list, dtypes, constants, scale);
  }
}

const UpdateRegistration registration("adam8bit", 4, sizeof(AdamConstants), &adam8bit);

}  // namespace
}  // namespace ds::kernels::cuda

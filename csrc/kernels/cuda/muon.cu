// The element-wise halves of Muon: the formulas of kernels/muon.h, operation by operation (and --fmad=false), so that
// the bits are those of the CPU.
#include "kernels/cuda/segment_list.cuh"
#include "kernels/muon.h"

namespace ds::kernels::cuda {
namespace {

// Calls step(part, i, width) for the elements of this thread.
template <typename Step>
__device__ void for_part(const SegmentList& list, const Step& step) {
  const int number = list.find(blockIdx.x);
  const SegmentPart& part = list.parts[number];
  const size_t begin = size_t{blockIdx.x - list.begin(number)} * kUpdateChunk;
  const size_t end = part.numel < begin + kUpdateChunk ? part.numel : begin + kUpdateChunk;
  const bool packed = aligned(part.master) && aligned(part.states[0]) && aligned(part.grad) && aligned(part.lp) &&
                      aligned(part.scratch);
  for_elements(begin, end, threadIdx.x, kThreads, packed, [&](size_t i, auto width) { step(part, i, width); });
}

__global__ void __launch_bounds__(kThreads)
    momentum_kernel(const __grid_constant__ SegmentList list, UpdateDtypes t, MuonConstants c, const StepScale* scale) {
  if (scale != nullptr && scale->skip) return;
  const float grad_scale = scale != nullptr ? scale->grad_scale : 1.0f;
  for_part(list, [&](const SegmentPart& part, size_t i, auto width) {
    constexpr int kWidth = decltype(width)::value;
    float m[kWidth], g[kWidth];
    load(part.states[0], t.state, i, m);
    load(part.grad, t.grad, i, g);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      g[k] = g[k] * grad_scale;
      m[k] = m[k] + c.move * (g[k] - m[k]);
    }
    store_rounded(part.states[0], t.state, i, m, t, part.stream, part.first, 1);
    if (c.nesterov) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) m[k] = g[k] + c.beta * (m[k] - g[k]);
    }
    store(part.scratch, DType::kF32, i, m);
  });
}

__global__ void __launch_bounds__(kThreads)
    weights_kernel(const __grid_constant__ SegmentList list, UpdateDtypes t, MuonConstants c, const StepScale* scale) {
  if (scale != nullptr && scale->skip) return;
  for_part(list, [&](const SegmentPart& part, size_t i, auto width) {
    constexpr int kWidth = decltype(width)::value;
    float p[kWidth], u[kWidth];
    load(part.master, t.master, i, p);
    load(part.scratch, DType::kF32, i, u);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float change = c.lr * u[k] + c.decay * p[k];
      p[k] = p[k] - change;
    }
    store_rounded(part.master, t.master, i, p, t, part.stream, part.first, 0);
    if (part.lp != nullptr) store(part.lp, t.lp, i, p);
  });
}

template <auto kKernel>
void pass(const Launch& launch, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
          const StepScale* scale) {
  const auto constants = *static_cast<const MuonConstants*>(args.constants);
  for_segment_lists<kUpdateChunk>(segments, count, args, 1, [&](const SegmentList& list, unsigned chunks) {
    launch_kernel(launch, kKernel, chunks, kThreads, 0, list, dtypes_of(args), constants, scale);
  });
}

const UpdateRegistration momentum_registration("muon_momentum", 1, sizeof(MuonConstants), &pass<&momentum_kernel>);
const UpdateRegistration weights_registration("muon", 0, sizeof(MuonConstants), &pass<&weights_kernel>);

}  // namespace
}  // namespace ds::kernels::cuda

// LAMB: the formulas of kernels/lamb.h, operation by operation (and --fmad=false), and sums in the order of
// kernels/sum_order.h, so that the bits are those of the CPU.
#include "kernels/cuda/segment_list.cuh"
#include "kernels/lamb.h"
#include "kernels/sum_order.h"

namespace ds::kernels::cuda {
namespace {

constexpr int kWarp = 32;
static_assert(kSumLanes == kWarp, "a warp adds one block, a thread one lane");
constexpr int kWarpsPerBlock = 4;

struct Sums {
  double master, update;
};

__device__ float direction(float p, float m, float v, const LambConstants& c) {
  const float root = sqrtf(v + c.eps_inside) + c.eps_outside;
  return m / root + c.decay * p;
}

// One warp for each block of the sum. Its threads read neighbouring elements, in the order in which the lanes add.
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    moments_kernel(const __grid_constant__ SegmentList list, UpdateDtypes t, LambConstants c, const StepScale* scale,
                   Sums* block_sums) {
  const unsigned block = blockIdx.x * kWarpsPerBlock + threadIdx.x / kWarp;
  if (block >= list.parts[list.count - 1].end) return;  // a whole warp
  const int lane = threadIdx.x % kWarp;
  Sums sum = {0, 0};
  if (scale != nullptr && scale->skip) {
    if (lane == 0) block_sums[block] = sum;
    return;
  }
  const float grad_scale = scale != nullptr ? scale->grad_scale : 1.0f;
  const int number = list.find(block);
  const SegmentPart& part = list.parts[number];
  const size_t begin = size_t{block - list.begin(number)} * kSumBlock;
  const size_t end = part.numel - begin < kSumBlock ? part.numel : begin + kSumBlock;
  constexpr int kUnroll = 4;  // loads in flight
  for (size_t i = begin + lane; i < end; i += kUnroll * kWarp) {
    float p[kUnroll][1], g[kUnroll][1], m[kUnroll][1], v[kUnroll][1];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const size_t at = i + k * kWarp;
      if (at >= end) break;
      load(part.master, t.master, at, p[k]);
      load(part.grad, t.grad, at, g[k]);
      load(part.states[0], t.state, at, m[k]);
      load(part.states[1], t.state, at, v[k]);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const size_t at = i + k * kWarp;
      if (at >= end) break;
      const float grad = g[k][0] * grad_scale;
      m[k][0] = m[k][0] + c.move1 * (grad - m[k][0]);
      v[k][0] = v[k][0] + c.move2 * (grad * grad - v[k][0]);
      store_rounded(part.states[0], t.state, at, m[k], t, part.stream, part.first, 1);
      store_rounded(part.states[1], t.state, at, v[k], t, part.stream, part.first, 2);
      const double master = p[k][0], update = direction(p[k][0], m[k][0], v[k][0], c);
      sum.master += master * master;
      sum.update += update * update;
    }
  }
#pragma unroll
  for (int width = kWarp / 2; width > 0; width /= 2) {
    sum.master += __shfl_down_sync(0xffffffffu, sum.master, width);
    sum.update += __shfl_down_sync(0xffffffffu, sum.update, width);
  }
  if (lane == 0) block_sums[block] = sum;
}

// Adds the block sums of each part to its parameter's: one thread block per part.
__global__ void __launch_bounds__(kSumBlockLanes)
    add_block_sums(const __grid_constant__ SegmentList list, const Sums* block_sums) {
  DS_SHARED(double, masters, [kSumBlockLanes]);
  DS_SHARED(double, updates, [kSumBlockLanes]);
  const SegmentPart& part = list.parts[blockIdx.x];
  double master = 0, update = 0;
  for (unsigned b = list.begin(blockIdx.x) + threadIdx.x; b < part.end; b += kSumBlockLanes) {
    master += block_sums[b].master;
    update += block_sums[b].update;
  }
  masters[threadIdx.x] = master;
  updates[threadIdx.x] = update;
  __syncthreads();
  for (unsigned width = kSumBlockLanes / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) {
      masters[threadIdx.x] += masters[threadIdx.x + width];
      updates[threadIdx.x] += updates[threadIdx.x + width];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    part.sums[0] += masters[0];
    part.sums[1] += updates[0];
  }
}

__global__ void __launch_bounds__(kThreads)
    weights_kernel(const __grid_constant__ SegmentList list, UpdateDtypes t, LambConstants c, const StepScale* scale) {
  if (scale != nullptr && scale->skip) return;
  const int number = list.find(blockIdx.x);
  const SegmentPart& part = list.parts[number];
  const float rate = c.rate * static_cast<float>(lamb_ratio(part.sums, c.min_ratio, c.max_ratio));
  const size_t begin = size_t{blockIdx.x - list.begin(number)} * kUpdateChunk;
  const size_t end = part.numel < begin + kUpdateChunk ? part.numel : begin + kUpdateChunk;
  const bool packed = aligned(part.master) && aligned(part.states[0]) && aligned(part.states[1]) && aligned(part.lp);
  for_elements(begin, end, threadIdx.x, kThreads, packed, [&](size_t i, auto width) {
    constexpr int kWidth = decltype(width)::value;
    float p[kWidth], m[kWidth], v[kWidth];
    load(part.master, t.master, i, p);
    load(part.states[0], t.state, i, m);
    load(part.states[1], t.state, i, v);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float change = rate * direction(p[k], m[k], v[k], c);
      p[k] = p[k] - change;
    }
    store_rounded(part.master, t.master, i, p, t, part.stream, part.first, 0);
    if (part.lp != nullptr) store(part.lp, t.lp, i, p);
  });
}

void moments(const Launch& launch, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
             const StepScale* scale) {
  const auto constants = *static_cast<const LambConstants*>(args.constants);
  size_t all = 0;
  for (size_t s = 0; s < count; ++s) all += sum_blocks(segments[s].numel);
  if (all == 0) return;
  static_assert(sizeof(Sums) <= kSumScratchBytes);
  // All of it before the first launch: a pass is done whole or not at all.
  auto* found = static_cast<Sums*>(launch.scratch->allocate(all * sizeof(Sums)));
  if (found == nullptr) return;  // whoever passed the scratch knows
  // No list cuts a segment here: that would take 2^31 blocks of 2^14 elements.
  for_segment_lists<kSumBlock>(segments, count, args, 2, [&](const SegmentList& list, unsigned blocks) {
    const unsigned grid = (blocks + kWarpsPerBlock - 1) / kWarpsPerBlock;
    launch_kernel(launch, &moments_kernel, grid, kWarpsPerBlock * kWarp, 0, list, dtypes_of(args), constants, scale,
                  found);
    launch_kernel(launch, &add_block_sums, list.count, kSumBlockLanes, 0, list, found);
    found += blocks;
  });
}

void weights(const Launch& launch, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
             const StepScale* scale) {
  const auto constants = *static_cast<const LambConstants*>(args.constants);
  for_segment_lists<kUpdateChunk>(segments, count, args, 2, [&](const SegmentList& list, unsigned chunks) {
    launch_kernel(launch, &weights_kernel, chunks, kThreads, 0, list, dtypes_of(args), constants, scale);
  });
}

const UpdateRegistration moments_registration("lamb_moments", 2, sizeof(LambConstants), &moments);
const UpdateRegistration weights_registration("lamb", 2, sizeof(LambConstants), &weights);

}  // namespace
}  // namespace ds::kernels::cuda

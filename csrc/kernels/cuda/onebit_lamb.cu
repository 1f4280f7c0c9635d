// 1-bit LAMB: the formulas of kernels/onebit_lamb.h, operation by operation (and --fmad=false), and sums in the order
// of kernels/sum_order.h, so that the bits are those of the CPU.
#include "kernels/cuda/segment_list.cuh"
#include "kernels/onebit_lamb.h"
#include "kernels/sum_order.h"

namespace ds::kernels::cuda {
namespace {

using namespace onebit_lamb;

constexpr int kWarp = 32;
static_assert(kSumLanes == kWarp, "a warp adds one block, a thread one lane");
constexpr int kWarpsPerBlock = 4;

struct Sums {
  double direction, update, largest;
};

__device__ float root_of(float v, const LambConstants& c) { return sqrtf(v + c.eps_inside) + c.eps_outside; }

__device__ double larger(double a, double b) { return a < b ? b : a; }

// One warp for each block of the sum. Its threads read neighbouring elements, in the order in which the lanes add.
// kMoments: "onebit_lamb_moments", else "onebit_lamb_size".
template <bool kMoments>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    sums_kernel(const __grid_constant__ SegmentList list, UpdateDtypes t, OneBitLambConstants all,
                const StepScale* scale, Sums* block_sums) {
  const LambConstants& c = all.lamb;
  const unsigned block = blockIdx.x * kWarpsPerBlock + threadIdx.x / kWarp;
  if (block >= list.parts[list.count - 1].end) return;  // a whole warp
  const int lane = threadIdx.x % kWarp;
  Sums sum = {0, 0, 0};
  if (scale != nullptr && scale->skip) {
    if (lane == 0) block_sums[block] = sum;
    return;
  }
  const int number = list.find(block);
  const SegmentPart& part = list.parts[number];
  const size_t begin = size_t{block - list.begin(number)} * kSumBlock;
  const size_t end = part.numel - begin < kSumBlock ? part.numel : begin + kSumBlock;
  const float scaling = static_cast<float>(part.sums[kScaling]);
  for (size_t i = begin + lane; i < end; i += kWarp) {
    float p[1], m[1], v[1], f[1];
    load(part.states[0], t.state, i, m);
    if (!kMoments) {
      const double moment = m[0];
      sum.direction += moment * moment;
      continue;
    }
    load(part.master, t.master, i, p);
    load(part.states[1], t.state, i, v);
    load(part.states[2], t.state, i, f);
    const float next = part.scratch[i] / scaling;
    const float grad = m[0] + (next - m[0]) / c.move1;
    if (all.begins) f[0] = v[0];
    f[0] = f[0] + c.move2 * (grad * grad - f[0]);
    m[0] = next;
    store_rounded(part.states[0], t.state, i, m, t, part.stream, part.first, 1);
    store_rounded(part.states[2], t.state, i, f, t, part.stream, part.first, 3);
    const float root = root_of(v[0], c);
    const float along = next / root;
    const double direction = along, update = along + c.decay * p[0];
    sum.largest = larger(sum.largest, root / root_of(f[0], c));
    sum.direction += direction * direction;
    sum.update += update * update;
  }
#pragma unroll
  for (int width = kWarp / 2; width > 0; width /= 2) {
    sum.direction += __shfl_down_sync(0xffffffffu, sum.direction, width);
    sum.update += __shfl_down_sync(0xffffffffu, sum.update, width);
    sum.largest = larger(sum.largest, __shfl_down_sync(0xffffffffu, sum.largest, width));
  }
  if (lane == 0) block_sums[block] = sum;
}

// Adds the block sums of each part to its parameter's: one thread block per part.
template <bool kMoments>
__global__ void __launch_bounds__(kSumBlockLanes)
    add_block_sums(const __grid_constant__ SegmentList list, const Sums* block_sums) {
  DS_SHARED(double, directions, [kSumBlockLanes]);
  DS_SHARED(double, updates, [kSumBlockLanes]);
  DS_SHARED(double, ratios, [kSumBlockLanes]);
  const SegmentPart& part = list.parts[blockIdx.x];
  double direction = 0, update = 0, ratio = 0;
  for (unsigned b = list.begin(blockIdx.x) + threadIdx.x; b < part.end; b += kSumBlockLanes) {
    direction += block_sums[b].direction;
    update += block_sums[b].update;
    ratio = larger(ratio, block_sums[b].largest);
  }
  directions[threadIdx.x] = direction;
  updates[threadIdx.x] = update;
  ratios[threadIdx.x] = ratio;
  __syncthreads();
  for (unsigned width = kSumBlockLanes / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) {
      directions[threadIdx.x] += directions[threadIdx.x + width];
      updates[threadIdx.x] += updates[threadIdx.x + width];
      ratios[threadIdx.x] = larger(ratios[threadIdx.x], ratios[threadIdx.x + width]);
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  part.sums[0] += directions[0];
  if (!kMoments) return;
  part.sums[1] += updates[0];
  part.sums[2] = larger(part.sums[2], ratios[0]);
}

// Elements of the weights (kLast), or of what is sent.
template <bool kLast>
__global__ void __launch_bounds__(kThreads)
    elements_kernel(const __grid_constant__ SegmentList list, UpdateDtypes t, LambConstants c, const StepScale* scale) {
  if (scale != nullptr && scale->skip) return;
  const float grad_scale = scale != nullptr ? scale->grad_scale : 1.0f;
  const int number = list.find(blockIdx.x);
  const SegmentPart& part = list.parts[number];
  const float factor = kLast ? c.rate * static_cast<float>(part.sums[kRatio]) : static_cast<float>(part.sums[kScaling]);
  const size_t begin = size_t{blockIdx.x - list.begin(number)} * kUpdateChunk;
  const size_t end = part.numel < begin + kUpdateChunk ? part.numel : begin + kUpdateChunk;
  const bool packed = aligned(part.master) && aligned(part.states[0]) && aligned(part.states[1]) && aligned(part.lp) &&
                      aligned(part.grad) && aligned(part.scratch);
  for_elements(begin, end, threadIdx.x, kThreads, packed, [&](size_t i, auto width) {
    constexpr int kWidth = decltype(width)::value;
    float p[kWidth], m[kWidth], v[kWidth], g[kWidth];
    load(part.states[0], t.state, i, m);
    if (!kLast) {
      load(part.grad, t.grad, i, g);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) m[k] = (m[k] + c.move1 * (g[k] * grad_scale - m[k])) * factor;
      return store(part.scratch, DType::kF32, i, m);
    }
    load(part.master, t.master, i, p);
    load(part.states[1], t.state, i, v);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float update = m[k] / root_of(v[k], c) + c.decay * p[k];
      p[k] = p[k] - factor * update;
    }
    store_rounded(part.master, t.master, i, p, t, part.stream, part.first, 0);
    if (part.lp != nullptr) store(part.lp, t.lp, i, p);
  });
}

// Once for each parameter: of a segment that several lists have, in the first one.
template <bool kFactor>
__global__ void __launch_bounds__(kThreads)
    numbers_kernel(const __grid_constant__ SegmentList list, OneBitLambConstants c, const StepScale* scale) {
  if (scale != nullptr && scale->skip) return;
  const int number = static_cast<int>(threadIdx.x);
  if (number >= list.count || list.parts[number].first != 0) return;
  if (kFactor) {
    factor_of_lamb(list.parts[number].sums, c);
  } else {
    average_lamb_ratio(list.parts[number].sums, c);
  }
}

template <bool kMoments>
void sums(const Launch& launch, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
          const StepScale* scale) {
  const auto constants = *static_cast<const OneBitLambConstants*>(args.constants);
  size_t all = 0;
  for (size_t s = 0; s < count; ++s) all += sum_blocks(segments[s].numel);
  if (all == 0) return;
  static_assert(sizeof(Sums) <= kSumScratchBytes);
  // All of it before the first launch: a pass is done whole or not at all.
  auto* found = static_cast<Sums*>(launch.scratch->allocate(all * sizeof(Sums)));
  if (found == nullptr) return;  // whoever passed the scratch knows
  for_segment_lists<kSumBlock>(segments, count, args, 3, [&](const SegmentList& list, unsigned blocks) {
    const unsigned grid = (blocks + kWarpsPerBlock - 1) / kWarpsPerBlock;
    launch_kernel(launch, &sums_kernel<kMoments>, grid, kWarpsPerBlock * kWarp, 0, list, dtypes_of(args), constants,
                  scale, found);
    launch_kernel(launch, &add_block_sums<kMoments>, list.count, kSumBlockLanes, 0, list, found);
    found += blocks;
  });
}

template <bool kLast>
void elements(const Launch& launch, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
              const StepScale* scale) {
  const LambConstants constants = static_cast<const OneBitLambConstants*>(args.constants)->lamb;
  for_segment_lists<kUpdateChunk>(segments, count, args, 2, [&](const SegmentList& list, unsigned chunks) {
    launch_kernel(launch, &elements_kernel<kLast>, chunks, kThreads, 0, list, dtypes_of(args), constants, scale);
  });
}

template <bool kFactor>
void numbers(const Launch& launch, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
             const StepScale* scale) {
  const auto constants = *static_cast<const OneBitLambConstants*>(args.constants);
  static_assert(SegmentList::kMax <= kThreads, "a thread for each part");
  for_segment_lists<kUpdateChunk>(segments, count, args, 0, [&](const SegmentList& list, unsigned) {
    launch_kernel(launch, &numbers_kernel<kFactor>, 1, kThreads, 0, list, constants, scale);
  });
}

constexpr size_t kBytes = sizeof(OneBitLambConstants);
const UpdateRegistration size_registration("onebit_lamb_size", 1, kBytes, &sums<false>);
const UpdateRegistration send_registration("onebit_lamb_send", 1, kBytes, &elements<false>);
const UpdateRegistration moments_registration("onebit_lamb_moments", 3, kBytes, &sums<true>);
const UpdateRegistration weights_registration("onebit_lamb", 2, kBytes, &elements<true>);
const UpdateRegistration coeff_registration("onebit_lamb_coeff", 0, kBytes, &numbers<false>);
const UpdateRegistration factor_registration("onebit_lamb_factor", 0, kBytes, &numbers<true>);

}  // namespace
}  // namespace ds::kernels::cuda

// The sum of squares over many tensors, in the order of [Note: order of the sum of squares] (kernels/sum_order.h): the
// same bits as on the CPU, on any GPU.
#include <algorithm>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/entries.cuh"
#include "kernels/cuda/piece_list.cuh"
#include "kernels/sum_order.h"

namespace ds::kernels::cuda {
namespace {

constexpr int kWarp = 32;
static_assert(kSumLanes == kWarp, "a warp adds one block, a thread one lane");
constexpr int kWarpsPerBlock = 4;

// Some of the segments, passed by value: kernel arguments have 4 KB, and nothing must be copied to the device first.
struct SumList {
  static constexpr int kMax = 128;
  const void* data[kMax];
  size_t numel[kMax];
  size_t end[kMax];  // number of blocks up to and including this segment
  int count;
};

template <typename T>
__device__ double sum_block(const T* data, size_t n, int lane) {
  double sum = 0;
  constexpr int kUnroll = 8;  // loads in flight
  size_t i = lane;
  for (; i + (kUnroll - 1) * kWarp < n; i += kUnroll * kWarp) {
    T x[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) x[k] = data[i + k * kWarp];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const double wide = widen(x[k]);
      sum += wide * wide;
    }
  }
  for (; i < n; i += kWarp) {
    const double wide = widen(data[i]);
    sum += wide * wide;
  }
#pragma unroll
  for (int width = kWarp / 2; width > 0; width /= 2) sum += __shfl_down_sync(0xffffffffu, sum, width);
  return sum;
}

__global__ void sum_blocks_kernel(const __grid_constant__ SumList list, DType dtype, double* block_sums) {
  const size_t block = blockIdx.x * size_t{kWarpsPerBlock} + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (block >= list.end[list.count - 1]) return;  // a whole warp
  int s = 0;
  for (int high = list.count - 1; s < high;) {  // the first segment that ends behind this block
    const int middle = (s + high) / 2;
    if (block < list.end[middle]) {
      high = middle;
    } else {
      s = middle + 1;
    }
  }
  const size_t begin = (block - (s == 0 ? 0 : list.end[s - 1])) * kSumBlock;
  const size_t n = list.numel[s] - begin < kSumBlock ? list.numel[s] - begin : kSumBlock;
  double sum = 0;
  switch (dtype) {
    case DType::kF32: sum = sum_block(static_cast<const float*>(list.data[s]) + begin, n, lane); break;
    case DType::kF16: sum = sum_block(static_cast<const __half*>(list.data[s]) + begin, n, lane); break;
    case DType::kBF16: sum = sum_block(static_cast<const __nv_bfloat16*>(list.data[s]) + begin, n, lane); break;
    case DType::kF64: sum = sum_block(static_cast<const double*>(list.data[s]) + begin, n, lane); break;
  }
  if (lane == 0) block_sums[block] = sum;
}

__global__ void add_block_sums(const double* block_sums, size_t blocks, double* sum) {
  DS_SHARED(double, lanes, [kSumBlockLanes]);
  double mine = 0;
  for (size_t b = threadIdx.x; b < blocks; b += kSumBlockLanes) mine += block_sums[b];
  lanes[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned width = kSumBlockLanes / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) lanes[threadIdx.x] += lanes[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) *sum += lanes[0];
}

__global__ void finish_norm_kernel(const double* sum, const double* failed, float loss_scale, float max_norm,
                                   bool check, StepScale* out) {
  const double norm = sqrt(*sum) / loss_scale;
  double factor = 1.0 / loss_scale;
  if (max_norm > 0) {
    const double clip = max_norm / (norm + 1e-6);
    if (!(clip >= 1)) factor *= clip;
  }
  out->norm = norm;
  out->grad_scale = static_cast<float>(factor);
  out->skip = check && !isfinite(norm) ? kSkipNotFinite : 0;
  if (failed != nullptr && *failed != 0) out->skip = kSkipFailed;
}

constexpr size_t kChunk = 16 * kThreads * kPack;  // elements that one block looks at

__global__ void find_nonfinite_kernel(const __grid_constant__ PieceList<Checked> list, DType dtype) {
  const int one = list.find(blockIdx.x);
  const Checked& array = list.pieces[one];
  const size_t begin = list.begin(one, blockIdx.x, kChunk);
  const size_t end = begin + kChunk < array.numel ? begin + kChunk : array.numel;
  int32_t found = 0;
  const auto look = [&](auto x) { found |= (isnan(x) ? kFoundNan : 0) | (isinf(x) ? kFoundInf : 0); };
  for_elements(begin, end, threadIdx.x, blockDim.x, aligned(array.data), [&](size_t i, auto width) {
    if (dtype == DType::kF64) {
      double x[width.value];
      load(array.data, dtype, i, x);
      for (int k = 0; k < width.value; ++k) look(x[k]);
    } else {
      float x[width.value];
      load(array.data, dtype, i, x);
      for (int k = 0; k < width.value; ++k) look(x[k]);
    }
  });
  if (found != 0) atomicOr(array.found, found);
}

}  // namespace

void sum_squares(const Launch& launch, const Segment* segments, size_t count, DType dtype, double* sum) {
  size_t blocks = 0;
  for (size_t s = 0; s < count; ++s) blocks += sum_blocks(segments[s].numel);
  if (blocks == 0) return;
  auto* block_sums = static_cast<double*>(launch.scratch->allocate(blocks * sizeof(double)));
  if (block_sums == nullptr) return;  // whoever passed the scratch knows
  size_t done = 0;
  for (size_t s = 0; s < count;) {
    SumList list;
    list.count = 0;
    size_t here = 0;
    for (; s < count && list.count < SumList::kMax; ++s) {
      if (segments[s].numel == 0) continue;
      list.data[list.count] = segments[s].data;
      list.numel[list.count] = segments[s].numel;
      list.end[list.count++] = here += sum_blocks(segments[s].numel);
    }
    if (here == 0) break;
    const unsigned grid = static_cast<unsigned>((here + kWarpsPerBlock - 1) / kWarpsPerBlock);
    launch_kernel(launch, &sum_blocks_kernel, grid, kWarpsPerBlock * kWarp, 0, list, dtype, block_sums + done);
    done += here;
  }
  launch_kernel(launch, &add_block_sums, 1, kSumBlockLanes, 0, block_sums, blocks, sum);
}

void find_nonfinite(const Launch& launch, const Checked* arrays, size_t count, DType dtype) {
  for_piece_lists(arrays, count, kChunk, [&](const PieceList<Checked>& list, unsigned chunks) {
    launch_kernel(launch, &find_nonfinite_kernel, chunks, kThreads, 0, list, dtype);
  });
}

void finish_norm(const Launch& launch, const double* sum, const double* failed, float loss_scale, float max_norm,
                 bool check, StepScale* out) {
  launch_kernel(launch, &finish_norm_kernel, 1, 1, 0, sum, failed, loss_scale, max_norm, check, out);
}

}  // namespace ds::kernels::cuda

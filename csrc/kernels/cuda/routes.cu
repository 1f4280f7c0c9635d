// kernels/routes.h on a GPU.
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/entries.cuh"
#include "kernels/routes.h"

namespace ds::kernels::cuda {
namespace {

constexpr int kWarp = 32;

__device__ inline float sum_of_warp(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// A warp for each token.
__global__ void topk_gate_kernel(const float* logits, const float* select, size_t tokens, size_t experts, size_t k,
                                 float* probs, int32_t* index) {
  const size_t t = (blockIdx.x * size_t{blockDim.x} + threadIdx.x) / kWarp;
  const size_t lane = threadIdx.x % kWarp;
  if (t >= tokens) return;  // a whole warp
  const float *row = logits + t * experts, *by = (select != nullptr ? select : logits) + t * experts;
  float *p = probs + t * experts, largest = -INFINITY, sum = 0;
  int nan = 0;
  for (size_t e = lane; e < experts; e += kWarp) {
    nan |= isnan(row[e]);
    largest = fmaxf(largest, row[e]);
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    nan |= __shfl_xor_sync(0xffffffffu, nan, step);
  }
  for (size_t e = lane; e < experts; e += kWarp) sum += p[e] = expf(row[e] - largest);
  sum = sum_of_warp(sum);
  for (size_t e = lane; e < experts; e += kWarp) p[e] /= sum;
  for (size_t j = 0; j < k; ++j) {
    int best = -1;
    for (size_t e = lane; e < experts; e += kWarp) {
      bool taken = false;
      for (size_t i = 0; i < j; ++i) taken = taken || index[t * k + i] == static_cast<int32_t>(e);
      if (!taken && (best < 0 || by[e] > by[best])) best = static_cast<int>(e);
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const int other = __shfl_xor_sync(0xffffffffu, best, step);
      if (other >= 0 && (best < 0 || by[other] > by[best] || (by[other] == by[best] && other < best))) best = other;
    }
    if (lane == 0) index[t * k + j] = nan ? -2 : best;
    __syncwarp();
  }
}

// Rows move in spans, a warp for each, so that narrow rows leave no thread without work. A thread moves one pack: with
// more of them it needs more registers, and fewer threads wait for rows from anywhere in memory at the same time.
constexpr size_t kSpan = kWarp * kPack;

__host__ __device__ inline size_t spans_of(size_t width) { return (width + kSpan - 1) / kSpan; }

struct Span {
  size_t row, begin, end;  // elements of the row; after the last span of the last row there may be more
};

__device__ inline Span span_of_warp(size_t width) {
  const size_t warp = (blockIdx.x * size_t{blockDim.x} + threadIdx.x) / kWarp, spans = spans_of(width);
  const size_t begin = warp % spans * kSpan;
  return {warp / spans, begin, begin + kSpan < width ? begin + kSpan : width};
}

template <typename Acc>
__global__ void permute_kernel(void* out, const void* src, DType dtype, size_t width, size_t rows, const int32_t* index,
                               const float* weight, int64_t divisor) {
  const bool packed = width % kPack == 0 && aligned(out) && aligned(src);
  const Span span = span_of_warp(width);
  if (span.row >= rows) return;  // a whole warp
  const int32_t from = index[span.row];
  const Acc factor = from >= 0 && weight != nullptr ? weight[from] : Acc(1);
  for_elements(span.begin, span.end, threadIdx.x % kWarp, kWarp, packed, [&](size_t i, auto n) {
    Acc x[n.value] = {};
    if (from >= 0) load(src, dtype, from / divisor * width + i, x);
#pragma unroll
    for (int v = 0; v < n.value; ++v) x[v] *= factor;
    store(out, dtype, span.row * width + i, x);
  });
}

template <typename Acc>
__global__ void combine_kernel(void* out, const void* src, DType dtype, size_t width, size_t tokens, size_t k,
                               const int32_t* slot, const float* weight) {
  const bool packed = width % kPack == 0 && aligned(out) && aligned(src);
  const Span span = span_of_warp(width);
  if (span.row >= tokens) return;  // a whole warp
  for_elements(span.begin, span.end, threadIdx.x % kWarp, kWarp, packed, [&](size_t i, auto n) {
    Acc sum[n.value] = {};
    for (size_t a = span.row * k; a < (span.row + 1) * k; ++a) {
      if (slot[a] < 0) continue;
      const Acc factor = weight != nullptr ? weight[a] : Acc(1);
      Acc x[n.value];
      load(src, dtype, static_cast<size_t>(slot[a]) * width + i, x);
#pragma unroll
      for (int v = 0; v < n.value; ++v) sum[v] += x[v] * factor;
    }
    store(out, dtype, span.row * width + i, sum);
  });
}

// A warp for each assignment.
template <typename Acc>
__global__ void dot_kernel(float* out, const void* src, const void* grad, DType dtype, size_t width, size_t count,
                           size_t k, const int32_t* slot) {
  const size_t a = (blockIdx.x * size_t{blockDim.x} + threadIdx.x) / kWarp;
  const size_t lane = threadIdx.x % kWarp;
  if (a >= count) return;
  Acc sum = 0;
  for (size_t i = lane; i < width && slot[a] >= 0; i += kWarp) {
    Acc x[1], y[1];
    load(src, dtype, static_cast<size_t>(slot[a]) * width + i, x);
    load(grad, dtype, a / k * width + i, y);
    sum += x[0] * y[0];
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) out[a] = static_cast<float>(sum);
}

// ---- the product: tiles of c of kTile x kTile, each thread kSub x kSub of them --------------------------------------
constexpr int kTile = 64, kDepth = 16, kSub = 4, kGroupsPerLaunch = 64;

// By value, in the launch: nothing has to outlive the call.
struct GroupList {
  GemmGroup groups[kGroupsPerLaunch];
  unsigned first_tile[kGroupsPerLaunch + 1];
  int count;
};

template <typename Acc>
__global__ void __launch_bounds__(kThreads)
    gemm_kernel(const __grid_constant__ GroupList list, GemmForm form, DType dtype) {
  int which = 0;
  while (which + 1 < list.count && list.first_tile[which + 1] <= blockIdx.x) ++which;
  const GemmGroup g = list.groups[which];
  const unsigned tile = blockIdx.x - list.first_tile[which], across = static_cast<unsigned>((g.n + kTile - 1) / kTile);
  const int64_t row = static_cast<int64_t>(tile / across) * kTile, column = static_cast<int64_t>(tile % across) * kTile;
  DS_SHARED(Acc, a, [kDepth][kTile + 1]);
  DS_SHARED(Acc, b, [kDepth][kTile + 1]);
  const int ty = threadIdx.x / (kTile / kSub), tx = threadIdx.x % (kTile / kSub);
  Acc sum[kSub][kSub] = {};
  for (int64_t p = 0; p < g.k; p += kDepth) {
    for (int i = threadIdx.x; i < kDepth * kTile; i += kThreads) {
      // Neighbouring threads read neighbours in memory, whichever way the matrix lies.
      const int ap = form.a_turned ? i / kTile : i % kDepth, ar = form.a_turned ? i % kTile : i / kDepth;
      const int bp = form.b_turned ? i % kDepth : i / kTile, bc = form.b_turned ? i / kDepth : i % kTile;
      Acc x[1] = {0}, y[1] = {0};
      if (p + ap < g.k && row + ar < g.m)
        load(g.a, dtype, form.a_turned ? (p + ap) * g.m + row + ar : (row + ar) * g.k + p + ap, x);
      if (p + bp < g.k && column + bc < g.n)
        load(g.b, dtype, form.b_turned ? (column + bc) * g.k + p + bp : (p + bp) * g.n + column + bc, y);
      a[ap][ar] = x[0];
      b[bp][bc] = y[0];
    }
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
#pragma unroll
        for (int j = 0; j < kSub; ++j) sum[i][j] += a[d][ty * kSub + i] * b[d][tx * kSub + j];
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < kSub; ++i) {
    for (int j = 0; j < kSub; ++j) {
      const int64_t r = row + ty * kSub + i, c = column + tx * kSub + j;
      if (r >= g.m || c >= g.n) continue;
      Acc x[1] = {0};
      if (g.bias != nullptr) load(g.bias, dtype, c, x);
      x[0] += sum[i][j];
      store(g.c, dtype, r * g.n + c, x);
    }
  }
}

unsigned blocks_of_warps(size_t warps) { return static_cast<unsigned>((warps * kWarp + kThreads - 1) / kThreads); }

void topk_gate(const Launch& launch, const float* logits, const float* select, size_t tokens, size_t experts, size_t k,
               float* probs, int32_t* index) {
  if (tokens == 0) return;
  launch_kernel(launch, &topk_gate_kernel, blocks_of_warps(tokens), kThreads, 0, logits, select, tokens, experts, k,
                probs, index);
}

void permute_rows(const Launch& launch, void* out, const void* src, DType dtype, size_t width, size_t rows,
                  const int32_t* index, const float* weight, int64_t divisor) {
  if (rows * width == 0) return;
  const auto kernel = dtype == DType::kF64 ? &permute_kernel<double> : &permute_kernel<float>;
  launch_kernel(launch, kernel, blocks_of_warps(rows * spans_of(width)), kThreads, 0, out, src, dtype, width, rows,
                index, weight, divisor);
}

void combine_rows(const Launch& launch, void* out, const void* src, DType dtype, size_t width, size_t tokens, size_t k,
                  const int32_t* slot, const float* weight) {
  if (tokens * width == 0) return;
  const auto kernel = dtype == DType::kF64 ? &combine_kernel<double> : &combine_kernel<float>;
  launch_kernel(launch, kernel, blocks_of_warps(tokens * spans_of(width)), kThreads, 0, out, src, dtype, width, tokens,
                k, slot, weight);
}

void dot_rows(const Launch& launch, float* out, const void* src, const void* grad, DType dtype, size_t width,
              size_t tokens, size_t k, const int32_t* slot) {
  if (tokens * k == 0) return;
  const auto kernel = dtype == DType::kF64 ? &dot_kernel<double> : &dot_kernel<float>;
  launch_kernel(launch, kernel, blocks_of_warps(tokens * k), kThreads, 0, out, src, grad, dtype, width, tokens * k, k,
                slot);
}

void grouped_gemm(const Launch& launch, const GemmGroup* groups, size_t count, GemmForm form, DType dtype) {
  const auto kernel = dtype == DType::kF64 ? &gemm_kernel<double> : &gemm_kernel<float>;
  GroupList list;
  list.count = 0;
  list.first_tile[0] = 0;
  const auto send = [&] {
    if (list.count > 0) launch_kernel(launch, kernel, list.first_tile[list.count], kThreads, 0, list, form, dtype);
    list.count = 0;
  };
  for (const GemmGroup* g = groups; g != groups + count; ++g) {
    const int64_t tiles = (g->m + kTile - 1) / kTile * ((g->n + kTile - 1) / kTile);
    if (tiles == 0) continue;
    if (list.count == kGroupsPerLaunch) send();
    list.groups[list.count] = *g;
    list.first_tile[list.count + 1] = list.first_tile[list.count] + static_cast<unsigned>(tiles);
    ++list.count;
  }
  send();
}

constexpr RouteKernels kRoutes = {kRouteAbi, sizeof(RouteKernels), &topk_gate, &permute_rows, &combine_rows,
                                  &dot_rows, &grouped_gemm};

}  // namespace
}  // namespace ds::kernels::cuda

const ds::kernels::RouteKernels* ds_device_route_kernels(uint32_t abi) {
  return abi == ds::kernels::kRouteAbi ? &ds::kernels::cuda::kRoutes : nullptr;
}

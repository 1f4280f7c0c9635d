// kernels/routes.h on a GPU.
#include <type_traits>

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

// Rows move in spans: a warp for each. A thread loads all its packs before it stores one, because a row from anywhere
// in memory takes long to come.
constexpr int kPacks = 4;
template <typename T>
using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;
constexpr size_t kSpan = kWarp * kPack * kPacks;

__host__ __device__ inline size_t spans_of(size_t width) { return (width + kSpan - 1) / kSpan; }

// The span of a row that the warp of this thread has.
struct Span {
  size_t row, begin, end;  // elements of the row; rows at the end may not exist
  bool packed;
};

__device__ inline Span span_of_warp(size_t width, const void* out, const void* src) {
  const size_t warp = (blockIdx.x * size_t{blockDim.x} + threadIdx.x) / kWarp, spans = spans_of(width);
  const size_t begin = warp % spans * kSpan;
  return {warp / spans, begin, begin + kSpan < width ? begin + kSpan : width,
          width % kPack == 0 && aligned(out) && aligned(src)};
}

// The first element of pack j of this thread.
__device__ inline size_t at_pack(const Span& span, int j) {
  return span.begin + (static_cast<size_t>(j) * kWarp + threadIdx.x % kWarp) * kPack;
}

template <typename T>
__device__ void load_packs(const void* src, size_t from, const Span& span, Pack<T> (&packs)[kPacks]) {
#pragma unroll
  for (int j = 0; j < kPacks; ++j)
    if (at_pack(span, j) < span.end)
      packs[j] = *reinterpret_cast<const Pack<T>*>(static_cast<const T*>(src) + from + at_pack(span, j));
}

template <typename T, typename Acc>
__device__ void store_packs(void* out, size_t to, const Span& span, const Acc (&x)[kPacks][kPack]) {
#pragma unroll
  for (int j = 0; j < kPacks; ++j)
    if (at_pack(span, j) < span.end) store_pack<T>(out, to + at_pack(span, j), x[j]);
}

// x += factor * packs, or x = factor * packs.
template <bool kAdds, typename T, typename Acc>
__device__ void scale_packs(const Pack<T> (&packs)[kPacks], Acc factor, const Span& span, Acc (&x)[kPacks][kPack]) {
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    if (at_pack(span, j) >= span.end) continue;
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      const Acc scaled = static_cast<Acc>(widen(packs[j].x[v])) * factor;
      x[j][v] = kAdds ? x[j][v] + scaled : scaled;
    }
  }
}

template <typename T>
__global__ void permute_kernel(void* out, const void* src, size_t width, size_t rows, const int32_t* index,
                               const float* weight, int64_t divisor) {
  using Acc = AccOf<T>;
  const Span span = span_of_warp(width, out, src);
  if (span.row >= rows) return;  // a whole warp
  const int32_t assignment = index[span.row];
  const size_t from = assignment < 0 ? 0 : assignment / divisor * width, to = span.row * width;
  const Acc factor = assignment >= 0 && weight != nullptr ? weight[assignment] : Acc(1);
  if (span.packed) {
    Pack<T> packs[kPacks];
    Acc x[kPacks][kPack] = {};
    if (assignment >= 0) {
      load_packs(src, from, span, packs);
      scale_packs<false>(packs, factor, span, x);
    }
    store_packs<T>(out, to, span, x);
    return;
  }
  for (size_t i = span.begin + threadIdx.x % kWarp; i < span.end; i += kWarp) {
    const Acc x = assignment < 0 ? Acc(0) : static_cast<Acc>(widen(static_cast<const T*>(src)[from + i])) * factor;
    put(static_cast<T*>(out)[to + i], x);
  }
}

template <typename T>
__global__ void combine_kernel(void* out, const void* src, size_t width, size_t tokens, size_t k, const int32_t* slot,
                               const float* weight) {
  using Acc = AccOf<T>;
  const Span span = span_of_warp(width, out, src);
  if (span.row >= tokens) return;  // a whole warp
  const size_t first = span.row * k, to = span.row * width;
  const auto factor_of = [&](size_t a) { return weight != nullptr ? static_cast<Acc>(weight[a]) : Acc(1); };
  if (span.packed) {
    Acc sum[kPacks][kPack] = {};
    for (size_t a = first; a < first + k; ++a) {
      if (slot[a] < 0) continue;
      Pack<T> packs[kPacks];
      load_packs(src, static_cast<size_t>(slot[a]) * width, span, packs);
      scale_packs<true>(packs, factor_of(a), span, sum);
    }
    store_packs<T>(out, to, span, sum);
    return;
  }
  for (size_t i = span.begin + threadIdx.x % kWarp; i < span.end; i += kWarp) {
    Acc sum = 0;
    for (size_t a = first; a < first + k; ++a) {
      if (slot[a] < 0) continue;
      sum +=
          static_cast<Acc>(widen(static_cast<const T*>(src)[static_cast<size_t>(slot[a]) * width + i])) * factor_of(a);
    }
    put(static_cast<T*>(out)[to + i], sum);
  }
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

// call(a value of the type).
template <typename Call>
void with_type(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kF32: return call(float{});
    case DType::kF16: return call(__half{});
    case DType::kBF16: return call(__nv_bfloat16{});
    case DType::kF64: return call(double{});
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
  with_type(dtype, [&](auto one) {
    launch_kernel(launch, &permute_kernel<decltype(one)>, blocks_of_warps(rows * spans_of(width)), kThreads, 0, out,
                  src, width, rows, index, weight, divisor);
  });
}

void combine_rows(const Launch& launch, void* out, const void* src, DType dtype, size_t width, size_t tokens, size_t k,
                  const int32_t* slot, const float* weight) {
  if (tokens * width == 0) return;
  with_type(dtype, [&](auto one) {
    launch_kernel(launch, &combine_kernel<decltype(one)>, blocks_of_warps(tokens * spans_of(width)), kThreads, 0, out,
                  src, width, tokens, k, slot, weight);
  });
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

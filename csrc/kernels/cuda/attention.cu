// kernels/attention.h on a GPU: plain, a warp for each row. Lanes take a key each (or a query each) while they find
// scores, and a feature each while they sum up; what a warp sums lies in shared memory.
#include "kernels/attention.h"

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/entries.cuh"

namespace ds::kernels::cuda {
namespace {

constexpr int kWarp = 32, kMostWarps = 4;
constexpr size_t kShared = 48 << 10;  // what every GPU gives a block without being asked

template <typename Acc>
__device__ Acc sum_of_warp(Acc x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
// A nan is larger than all.
template <typename Acc>
__device__ Acc larger(Acc a, Acc b) {
  return b > a || isnan(b) ? b : a;
}
template <typename Acc>
__device__ Acc largest_of_warp(Acc x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

__device__ inline int64_t offset_of(const AttentionOperand& x, int64_t batch, int64_t head, int64_t token) {
  return batch * x.batch + head * x.head + token * x.token;
}

template <typename Acc>
__device__ Acc element(const void* data, DType dtype, int64_t i) {
  Acc x[1];
  load(data, dtype, static_cast<size_t>(i), x);
  return x[0];
}

// A row in shared memory times one in memory.
template <typename Acc>
__device__ Acc dot(const Acc* row, const void* data, DType dtype, int64_t at, int64_t size) {
  Acc sum = 0;
  for (int64_t f = 0; f < size; ++f) sum += row[f] * element<Acc>(data, dtype, at + f);
  return sum;
}

// keys_by_position() and looks, for one key.
__device__ inline bool may_see(const AttentionShape& s, int64_t batch, int64_t row, int64_t key) {
  const int64_t own = row + s.offset;
  if (s.causal && key > own) return false;
  if (s.window > 0 && key <= own - s.window) return false;
  return s.looks == nullptr || s.looks[batch * s.looks_batch + row * s.looks_query + key] != 0;
}

template <typename Acc>
__device__ Acc capped(const AttentionShape& s, Acc score) {
  return s.soft_cap > 0 ? static_cast<Acc>(s.soft_cap) * tanh(score / static_cast<Acc>(s.soft_cap)) : score;
}
// The derivative of a score by its value before it was capped and scaled.
template <typename Acc>
__device__ Acc slope(const AttentionShape& s, Acc score) {
  const Acc t = s.soft_cap > 0 ? score / static_cast<Acc>(s.soft_cap) : Acc(0);
  return (1 - t * t) * static_cast<Acc>(s.scale);
}

template <typename Acc>
__device__ Acc factor(const AttentionShape& s, int64_t batch, int64_t head, int64_t row, int64_t key) {
  return static_cast<Acc>(dropout_factor(s.dropout, static_cast<uint32_t>(batch), static_cast<uint32_t>(head),
                                         static_cast<uint32_t>(row), static_cast<uint32_t>(key)));
}

// The row of a warp: batch, head and token; false where there is none.
struct Row {
  int64_t number, batch, head, token;
};
__device__ inline bool row_of_warp(int64_t heads, int64_t tokens, int64_t rows, Row& r) {
  r.number = blockIdx.x * int64_t{blockDim.x / kWarp} + threadIdx.x / kWarp;
  r.token = r.number % tokens;
  r.head = r.number / tokens % heads;
  r.batch = r.number / tokens / heads;
  return r.number < rows;
}

template <typename Acc>
__device__ Acc* shared_of_warp(int64_t per_warp) {
  DS_DYNAMIC_SHARED(shared_bytes);
  return reinterpret_cast<Acc*>(shared_bytes) + threadIdx.x / kWarp * per_warp;
}

template <typename Acc>
__global__ void forward_kernel(AttentionShape s, AttentionOperand query, AttentionOperand key, AttentionOperand value,
                               AttentionState state, bool fresh, int64_t rows) {
  Row r;
  if (!row_of_warp(s.heads, s.queries, rows, r)) return;  // a whole warp
  const int lane = threadIdx.x % kWarp;
  Acc* own = shared_of_warp<Acc>(s.size + s.value_size);
  Acc* sums = own + s.size;
  Acc *largest = static_cast<Acc*>(state.largest) + r.number, *total = static_cast<Acc*>(state.total) + r.number,
      *sum = static_cast<Acc*>(state.sum) + r.number * s.value_size;
  const int64_t kv = r.head / (s.heads / s.kv_heads), at = offset_of(query, r.batch, r.head, r.token);
  for (int64_t f = lane; f < s.size; f += kWarp)
    own[f] = element<Acc>(query.data, s.dtype, at + f) * static_cast<Acc>(s.scale);
  for (int64_t f = lane; f < s.value_size; f += kWarp) sums[f] = fresh ? Acc(0) : sum[f];
  Acc high = fresh ? static_cast<Acc>(-INFINITY) : *largest, all = fresh ? Acc(0) : *total;
  __syncwarp();
  for (int64_t first = 0; first < s.keys; first += kWarp) {
    const int64_t j = first + lane;
    const bool sees = j < s.keys && may_see(s, r.batch, r.token, j);
    const Acc score = sees ? capped(s, dot(own, key.data, s.dtype, offset_of(key, r.batch, kv, j), s.size))
                           : static_cast<Acc>(-INFINITY);
    const Acc level = larger(high, largest_of_warp(score));
    if (level == static_cast<Acc>(-INFINITY)) continue;  // the whole warp: nothing has been seen
    const Acc shrink = exp(high - level), p = sees ? exp(score - level) : Acc(0);
    const Acc used = sees ? p * factor<Acc>(s, r.batch, r.head, r.token, j) : Acc(0);
    all = all * shrink + sum_of_warp(p);
    high = level;
    const int64_t count = s.keys - first < kWarp ? s.keys - first : kWarp;
    for (int64_t f = lane; f < s.value_size; f += kWarp) sums[f] *= shrink;
    for (int64_t t = 0; t < count; ++t) {
      const Acc weight = __shfl_sync(0xffffffffu, used, static_cast<int>(t));
      const int64_t from = offset_of(value, r.batch, kv, first + t);
      if (weight == 0) continue;
      for (int64_t f = lane; f < s.value_size; f += kWarp)
        sums[f] += weight * element<Acc>(value.data, s.dtype, from + f);
    }
  }
  for (int64_t f = lane; f < s.value_size; f += kWarp) sum[f] = sums[f];
  if (lane == 0) *largest = high, *total = all;
}

template <typename Acc>
__global__ void merge_kernel(AttentionState into, AttentionState from, size_t rows, size_t size) {
  const size_t row = (blockIdx.x * size_t{blockDim.x} + threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
  if (row >= rows) return;  // a whole warp
  Acc *largest = static_cast<Acc*>(into.largest) + row, *total = static_cast<Acc*>(into.total) + row;
  const Acc a = *largest, b = static_cast<const Acc*>(from.largest)[row], high = larger(a, b);
  if (high == static_cast<Acc>(-INFINITY)) return;
  const Acc keep = exp(a - high), add = exp(b - high);
  const Acc all = *total * keep + static_cast<const Acc*>(from.total)[row] * add;
  for (size_t i = row * size + lane; i < (row + 1) * size; i += kWarp)
    static_cast<Acc*>(into.sum)[i] = static_cast<Acc*>(into.sum)[i] * keep + static_cast<const Acc*>(from.sum)[i] * add;
  __syncwarp();  // every lane has read, also where both states are one
  if (lane == 0) *largest = high, *total = all;
}

// The values that both backward kernels compute for one query and one key: the factor of the value, and the gradient of
// the score before it was capped and scaled.
template <typename Acc>
struct Pair {
  Acc probability, score;
};
template <typename Acc>
__device__ Pair<Acc> pair_of(const AttentionShape& s, Acc product, Acc upper, Acc lse, Acc row_sum, Acc kept) {
  const Acc score = capped(s, product * static_cast<Acc>(s.scale)), p = exp(score - lse);
  return {p * kept, p * (upper * kept - row_sum) * slope(s, score)};
}

// Gradients of queries: a warp for each of their rows.
template <typename Acc>
__global__ void query_kernel(AttentionShape s, AttentionOperand query, AttentionOperand key, AttentionOperand value,
                             AttentionOperand grad, const Acc* lse, const Acc* row_sum, Acc* for_query, int64_t rows) {
  Row r;
  if (!row_of_warp(s.heads, s.queries, rows, r)) return;
  const int lane = threadIdx.x % kWarp;
  Acc *own = shared_of_warp<Acc>(2 * s.size + s.value_size), *upper = own + s.size, *sums = upper + s.value_size;
  const int64_t kv = r.head / (s.heads / s.kv_heads), at = offset_of(query, r.batch, r.head, r.token),
                above = offset_of(grad, r.batch, r.head, r.token);
  for (int64_t f = lane; f < s.size; f += kWarp) own[f] = element<Acc>(query.data, s.dtype, at + f), sums[f] = 0;
  for (int64_t f = lane; f < s.value_size; f += kWarp) upper[f] = element<Acc>(grad.data, s.dtype, above + f);
  __syncwarp();
  for (int64_t first = 0; first < s.keys; first += kWarp) {
    const int64_t j = first + lane;
    Pair<Acc> found = {0, 0};
    if (j < s.keys && may_see(s, r.batch, r.token, j))
      found = pair_of(s, dot(own, key.data, s.dtype, offset_of(key, r.batch, kv, j), s.size),
                      dot(upper, value.data, s.dtype, offset_of(value, r.batch, kv, j), s.value_size), lse[r.number],
                      row_sum[r.number], factor<Acc>(s, r.batch, r.head, r.token, j));
    const int64_t count = s.keys - first < kWarp ? s.keys - first : kWarp;
    for (int64_t t = 0; t < count; ++t) {
      const Acc weight = __shfl_sync(0xffffffffu, found.score, static_cast<int>(t));
      const int64_t from = offset_of(key, r.batch, kv, first + t);
      if (weight == 0) continue;
      for (int64_t f = lane; f < s.size; f += kWarp) sums[f] += weight * element<Acc>(key.data, s.dtype, from + f);
    }
  }
  for (int64_t f = lane; f < s.size; f += kWarp) for_query[r.number * s.size + f] = sums[f];
}

// Gradients of keys and values: a warp for each key.
template <typename Acc>
__global__ void key_kernel(AttentionShape s, AttentionOperand query, AttentionOperand key, AttentionOperand value,
                           AttentionOperand grad, const Acc* lse, const Acc* row_sum, Acc* for_key, Acc* for_value,
                           int64_t rows) {
  Row r;
  if (!row_of_warp(s.kv_heads, s.keys, rows, r)) return;
  const int lane = threadIdx.x % kWarp;
  Acc *own = shared_of_warp<Acc>(2 * (s.size + s.value_size)), *own_value = own + s.size,
      *key_sums = own_value + s.value_size, *value_sums = key_sums + s.size;
  const int64_t readers = s.heads / s.kv_heads, at = offset_of(key, r.batch, r.head, r.token),
                at_value = offset_of(value, r.batch, r.head, r.token);
  for (int64_t f = lane; f < s.size; f += kWarp) own[f] = element<Acc>(key.data, s.dtype, at + f), key_sums[f] = 0;
  for (int64_t f = lane; f < s.value_size; f += kWarp)
    own_value[f] = element<Acc>(value.data, s.dtype, at_value + f), value_sums[f] = 0;
  __syncwarp();
  for (int64_t head = r.head * readers; head < (r.head + 1) * readers; ++head) {
    const int64_t number = (r.batch * s.heads + head) * s.queries;
    for (int64_t first = 0; first < s.queries; first += kWarp) {
      const int64_t i = first + lane;
      Pair<Acc> found = {0, 0};
      if (i < s.queries && may_see(s, r.batch, i, r.token))
        found = pair_of(s, dot(own, query.data, s.dtype, offset_of(query, r.batch, head, i), s.size),
                        dot(own_value, grad.data, s.dtype, offset_of(grad, r.batch, head, i), s.value_size),
                        lse[number + i], row_sum[number + i], factor<Acc>(s, r.batch, head, i, r.token));
      const int64_t count = s.queries - first < kWarp ? s.queries - first : kWarp;
      for (int64_t t = 0; t < count; ++t) {
        const Acc p = __shfl_sync(0xffffffffu, found.probability, static_cast<int>(t)),
                  down = __shfl_sync(0xffffffffu, found.score, static_cast<int>(t));
        const int64_t from = offset_of(query, r.batch, head, first + t),
                      above = offset_of(grad, r.batch, head, first + t);
        if (p == 0 && down == 0) continue;
        for (int64_t f = lane; f < s.size; f += kWarp)
          key_sums[f] += down * element<Acc>(query.data, s.dtype, from + f);
        for (int64_t f = lane; f < s.value_size; f += kWarp)
          value_sums[f] += p * element<Acc>(grad.data, s.dtype, above + f);
      }
    }
  }
  for (int64_t f = lane; f < s.size; f += kWarp) for_key[r.number * s.size + f] = key_sums[f];
  for (int64_t f = lane; f < s.value_size; f += kWarp) for_value[r.number * s.value_size + f] = value_sums[f];
}

// The numbers of blocks and threads: as many warps share a block as have room for their sums.
struct Grid {
  unsigned blocks, threads;
  size_t shared;
  Grid(int64_t rows, size_t bytes_of_warp) {
    size_t warps = kMostWarps;
    while (warps > 1 && warps * bytes_of_warp > kShared) warps /= 2;
    blocks = static_cast<unsigned>((static_cast<size_t>(rows) + warps - 1) / warps);
    threads = static_cast<unsigned>(warps * kWarp);
    shared = warps * bytes_of_warp;
  }
};

template <typename Acc>
void forward_as(const Launch& launch, const AttentionShape& s, const AttentionOperand& query,
                const AttentionOperand& key, const AttentionOperand& value, const AttentionState& state, bool fresh) {
  const int64_t rows = s.batch * s.heads * s.queries;
  if (rows == 0) return;
  const Grid grid(rows, (s.size + s.value_size) * sizeof(Acc));
  launch_kernel(launch, &forward_kernel<Acc>, grid.blocks, grid.threads, grid.shared, s, query, key, value, state,
                fresh, rows);
}

template <typename Acc>
void backward_as(const Launch& launch, const AttentionShape& s, const AttentionOperand& query,
                 const AttentionOperand& key, const AttentionOperand& value, const AttentionOperand& grad,
                 const void* lse, const void* row_sum, void* for_query, void* for_key, void* for_value) {
  const auto *levels = static_cast<const Acc*>(lse), *less = static_cast<const Acc*>(row_sum);
  const int64_t rows = s.batch * s.heads * s.queries, keys = s.batch * s.kv_heads * s.keys;
  if (rows > 0) {
    const Grid grid(rows, (2 * s.size + s.value_size) * sizeof(Acc));
    launch_kernel(launch, &query_kernel<Acc>, grid.blocks, grid.threads, grid.shared, s, query, key, value, grad,
                  levels, less, static_cast<Acc*>(for_query), rows);
  }
  if (keys > 0) {
    const Grid grid(keys, 2 * (s.size + s.value_size) * sizeof(Acc));
    launch_kernel(launch, &key_kernel<Acc>, grid.blocks, grid.threads, grid.shared, s, query, key, value, grad, levels,
                  less, static_cast<Acc*>(for_key), static_cast<Acc*>(for_value), keys);
  }
}

void forward(const Launch& launch, const AttentionShape& s, const AttentionOperand& query, const AttentionOperand& key,
             const AttentionOperand& value, const AttentionState& state, bool fresh) {
  const auto call = s.dtype == DType::kF64 ? &forward_as<double> : &forward_as<float>;
  call(launch, s, query, key, value, state, fresh);
}

void merge(const Launch& launch, const AttentionState& into, const AttentionState& from, DType wide, size_t rows,
           size_t value_size) {
  if (rows == 0) return;
  const auto kernel = wide == DType::kF64 ? &merge_kernel<double> : &merge_kernel<float>;
  const auto blocks = static_cast<unsigned>((rows * kWarp + kThreads - 1) / kThreads);
  launch_kernel(launch, kernel, blocks, kThreads, 0, into, from, rows, value_size);
}

void backward(const Launch& launch, const AttentionShape& s, const AttentionOperand& query, const AttentionOperand& key,
              const AttentionOperand& value, const AttentionOperand& grad, const void* lse, const void* row_sum,
              void* for_query, void* for_key, void* for_value) {
  const auto call = s.dtype == DType::kF64 ? &backward_as<double> : &backward_as<float>;
  call(launch, s, query, key, value, grad, lse, row_sum, for_query, for_key, for_value);
}

constexpr AttentionKernels kAttention = {kAttentionAbi, sizeof(AttentionKernels), &forward, &merge, &backward};

}  // namespace
}  // namespace ds::kernels::cuda

const ds::kernels::AttentionKernels* ds_device_attention_kernels(uint32_t abi) {
  return abi == ds::kernels::kAttentionAbi ? &ds::kernels::cuda::kAttention : nullptr;
}

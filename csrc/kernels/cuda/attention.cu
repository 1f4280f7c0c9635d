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

// A row in shared memory times one in memory.
template <typename Acc>
__device__ Acc dot(const Acc* row, const void* data, DType dtype, int64_t at, int64_t size) {
  Acc sum = 0;
  for (int64_t f = 0; f < size; ++f) sum += row[f] * element<Acc>(data, dtype, at + f);
  return sum;
}

// keys_by_position() and looks, for one key of a block that the row sees.
__device__ inline bool may_see(const AttentionShape& s, int64_t batch, int64_t row, int64_t key) {
  const int64_t own = row + s.offset;
  if (s.causal && key > own) return false;
  if (s.window > 0 && key <= own - s.window) return false;
  return s.looks == nullptr || s.looks[batch * s.looks_batch + row * s.looks_query + key] != 0;
}

// Tokens that a warp takes at a time, one for each lane: those of `all` tokens that are in the blocks of a list.
struct Chunks {
  ListedBlocks blocks;
  int64_t size, per_block, all;
  __device__ Chunks(const ListedBlocks& listed, int64_t block, int64_t tokens)
      : blocks(listed), size(listed.all ? tokens : block), per_block((size + kWarp - 1) / kWarp), all(tokens) {}
  __device__ int64_t count() const { return blocks.count * per_block; }
  __device__ int64_t first(int64_t i) const {
    return (blocks.all ? 0 : blocks.list[i / per_block] * size) + i % per_block * kWarp;
  }
  // The tokens of a chunk that begins at `first`; 0: the last block ends before.
  __device__ int64_t tokens(int64_t i, int64_t first) const {
    const int64_t left = size - i % per_block * kWarp, rest = all - first, most = left < rest ? left : rest;
    return most < kWarp ? (most < 0 ? 0 : most) : kWarp;
  }
};
__device__ inline Chunks keys_of_row(const AttentionShape& s, int64_t head, int64_t row) {
  return Chunks(blocks_of(s, head, row), s.blocks.size, s.keys);
}
__device__ inline Chunks rows_of_key(const AttentionShape& s, int64_t head, int64_t key) {
  ListedBlocks found = {nullptr, 1, true};
  if (s.blocks.size > 0) {
    const int32_t* at = s.blocks.reader_start + head * s.blocks.reader_heads + key / s.blocks.size;
    found = {s.blocks.readers + at[0], at[1] - at[0], false};
  }
  return Chunks(found, s.blocks.size, s.queries);
}

// Whether a key is in one of the blocks, whose numbers ascend.
__device__ inline bool listed_among(const ListedBlocks& blocks, int64_t key, int64_t size) {
  if (blocks.all) return true;
  int64_t low = 0, high = blocks.count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (blocks.list[middle] < key / size) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < blocks.count && blocks.list[low] == key / size;
}

template <typename Acc>
__device__ Acc bias_of(const AttentionShape& s, int64_t batch, int64_t head, int64_t row, int64_t key) {
  Acc sum = 0;
  for (int i = 0; i < kAttentionBiases; ++i)
    if (s.bias[i].data != nullptr)
      sum += element<Acc>(s.bias[i].data, s.bias[i].dtype, bias_offset(s.bias[i], batch, head, row, key));
  return sum;
}

template <typename Acc>
__device__ Acc capped(const AttentionShape& s, Acc score) {
  return s.soft_cap > 0 ? static_cast<Acc>(s.soft_cap) * tanh(score / static_cast<Acc>(s.soft_cap)) : score;
}
// The derivative of a capped score by its value before it was capped and scaled.
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
  const Chunks chunks = keys_of_row(s, r.head, r.token);
  for (int64_t c = 0; c < chunks.count(); ++c) {
    const int64_t first = chunks.first(c), count = chunks.tokens(c, first), j = first + lane;
    const bool sees = lane < count && may_see(s, r.batch, r.token, j);
    const Acc score = sees ? capped(s, dot(own, key.data, s.dtype, offset_of(key, r.batch, kv, j), s.size)) +
                                 bias_of<Acc>(s, r.batch, r.head, r.token, j)
                           : static_cast<Acc>(-INFINITY);
    const Acc level = larger(high, largest_of_warp(score));
    if (level == static_cast<Acc>(-INFINITY)) continue;  // the whole warp: nothing has been seen
    const Acc shrink = exp(high - level), p = sees ? exp(score - level) : Acc(0);
    const Acc used = sees ? p * factor<Acc>(s, r.batch, r.head, r.token, j) : Acc(0);
    all = all * shrink + sum_of_warp(p);
    high = level;
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

// The values that the kernels of backward compute for one query and one key: the factor of the value, and the gradients
// of the score with its biases and of the score before it was capped and scaled.
template <typename Acc>
struct Pair {
  Acc probability, biased, score;
};
template <typename Acc>
__device__ Pair<Acc> pair_of(const AttentionShape& s, Acc product, Acc bias, Acc upper, Acc lse, Acc row_sum,
                             Acc kept) {
  const Acc score = capped(s, product * static_cast<Acc>(s.scale));
  const Acc level = lse == static_cast<Acc>(-INFINITY) ? Acc(0) : lse;  // all that the row sees is -inf
  const Acc p = exp(score + bias - level), biased = p * (upper * kept - row_sum);
  return {p * kept, biased, biased * slope(s, score)};
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
  const Chunks chunks = keys_of_row(s, r.head, r.token);
  for (int64_t c = 0; c < chunks.count(); ++c) {
    const int64_t first = chunks.first(c), count = chunks.tokens(c, first), j = first + lane;
    Pair<Acc> found = {0, 0, 0};
    if (lane < count && may_see(s, r.batch, r.token, j))
      found = pair_of(s, dot(own, key.data, s.dtype, offset_of(key, r.batch, kv, j), s.size),
                      bias_of<Acc>(s, r.batch, r.head, r.token, j),
                      dot(upper, value.data, s.dtype, offset_of(value, r.batch, kv, j), s.value_size), lse[r.number],
                      row_sum[r.number], factor<Acc>(s, r.batch, r.head, r.token, j));
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
    const Chunks chunks = rows_of_key(s, head, r.token);
    for (int64_t c = 0; c < chunks.count(); ++c) {
      const int64_t first = chunks.first(c), count = chunks.tokens(c, first), i = first + lane;
      Pair<Acc> found = {0, 0, 0};
      if (lane < count && may_see(s, r.batch, i, r.token))
        found = pair_of(s, dot(own, query.data, s.dtype, offset_of(query, r.batch, head, i), s.size),
                        bias_of<Acc>(s, r.batch, head, i, r.token),
                        dot(own_value, grad.data, s.dtype, offset_of(grad, r.batch, head, i), s.value_size),
                        lse[number + i], row_sum[number + i], factor<Acc>(s, r.batch, head, i, r.token));
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

// Gradients of a bias: a warp for each of its rows of one query (of all queries, where these share it), and for as many
// keys as it has lanes (for all of them, where these share it), which it adds up over all that share them.
template <typename Acc>
__global__ void bias_kernel(AttentionShape s, AttentionOperand query, AttentionOperand key, AttentionOperand value,
                            AttentionOperand grad, const Acc* lse, const Acc* row_sum, int which, Acc* for_bias,
                            BiasSizes n, int64_t parts, int64_t warps) {
  Row r;
  if (!row_of_warp(n.heads, n.queries * parts, warps, r)) return;
  const int lane = threadIdx.x % kWarp;
  Acc *own = shared_of_warp<Acc>(s.size + s.value_size), *upper = own + s.size;
  const int64_t inner = s.bias[which].inner, outer = s.batch / inner, row = r.token / parts, part = r.token % parts;
  const int64_t first_o = n.outer == 1 ? 0 : r.batch / n.inner, last_o = n.outer == 1 ? outer : first_o + 1;
  const int64_t first_i = n.inner == 1 ? 0 : r.batch % n.inner, last_i = n.inner == 1 ? inner : first_i + 1;
  const int64_t first_h = n.heads == 1 ? 0 : r.head, last_h = n.heads == 1 ? s.heads : first_h + 1;
  const int64_t first_q = n.queries == 1 ? 0 : row, last_q = n.queries == 1 ? s.queries : first_q + 1;
  const int64_t first_k = part * kWarp, last_k = n.keys == 1 ? s.keys : first_k + 1;
  Acc sum = 0;
  for (int64_t o = first_o; o < last_o; ++o)
    for (int64_t i = first_i; i < last_i; ++i)
      for (int64_t h = first_h; h < last_h; ++h)
        for (int64_t q = first_q; q < last_q; ++q) {
          const int64_t b = o * inner + i, kv = h / (s.heads / s.kv_heads), number = (b * s.heads + h) * s.queries + q;
          const int64_t at = offset_of(query, b, h, q), above = offset_of(grad, b, h, q);
          __syncwarp();  // every lane has read what it needs of the row before
          for (int64_t f = lane; f < s.size; f += kWarp) own[f] = element<Acc>(query.data, s.dtype, at + f);
          for (int64_t f = lane; f < s.value_size; f += kWarp) upper[f] = element<Acc>(grad.data, s.dtype, above + f);
          __syncwarp();
          const ListedBlocks listed = blocks_of(s, h, q);
          for (int64_t k = first_k; k < last_k; k += kWarp) {
            const int64_t j = k + lane;
            if (j >= s.keys || !may_see(s, b, q, j) || !listed_among(listed, j, s.blocks.size)) continue;
            sum +=
                pair_of(s, dot(own, key.data, s.dtype, offset_of(key, b, kv, j), s.size), bias_of<Acc>(s, b, h, q, j),
                        dot(upper, value.data, s.dtype, offset_of(value, b, kv, j), s.value_size), lse[number],
                        row_sum[number], factor<Acc>(s, b, h, q, j))
                    .biased;
          }
        }
  Acc* to = for_bias + ((r.batch * n.heads + r.head) * n.queries + row) * n.keys;
  if (n.keys == 1) {
    sum = sum_of_warp(sum);
    if (lane == 0) *to = sum;
  } else if (first_k + lane < s.keys) {
    to[first_k + lane] = sum;
  }
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

template <typename Acc>
void bias_backward_as(const Launch& launch, const AttentionShape& s, const AttentionOperand& query,
                      const AttentionOperand& key, const AttentionOperand& value, const AttentionOperand& grad,
                      const void* lse, const void* row_sum, int which, void* for_bias) {
  const BiasSizes n = bias_sizes(s, which);
  const int64_t parts = n.keys == 1 ? 1 : (s.keys + kWarp - 1) / kWarp,
                warps = n.outer * n.inner * n.heads * n.queries * parts;
  if (warps == 0) return;
  const Grid grid(warps, (s.size + s.value_size) * sizeof(Acc));
  launch_kernel(launch, &bias_kernel<Acc>, grid.blocks, grid.threads, grid.shared, s, query, key, value, grad,
                static_cast<const Acc*>(lse), static_cast<const Acc*>(row_sum), which, static_cast<Acc*>(for_bias), n,
                parts, warps);
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

void bias_backward(const Launch& launch, const AttentionShape& s, const AttentionOperand& query,
                   const AttentionOperand& key, const AttentionOperand& value, const AttentionOperand& grad,
                   const void* lse, const void* row_sum, int which, void* for_bias) {
  const auto call = s.dtype == DType::kF64 ? &bias_backward_as<double> : &bias_backward_as<float>;
  call(launch, s, query, key, value, grad, lse, row_sum, which, for_bias);
}

constexpr AttentionKernels kAttention = {kAttentionAbi, sizeof(AttentionKernels), &forward, &merge, &backward,
                                         &bias_backward};

}  // namespace
}  // namespace ds::kernels::cuda

const ds::kernels::AttentionKernels* ds_device_attention_kernels(uint32_t abi) {
  return abi == ds::kernels::kAttentionAbi ? &ds::kernels::cuda::kAttention : nullptr;
}

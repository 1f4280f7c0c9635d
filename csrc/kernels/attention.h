// Attention of blocks, in a table of its own beside kernels/table.h, whose rules hold here, too: some queries see some
// keys, and what they have seen is kept as the largest score of each row, the sum of exponentials and the sum of values
// (Dao, "FlashAttention-2" (2023), algorithms 1 and 2). Scores are never in memory but for a tile of them.
//
// Statistics, state and gradients are fp32, fp64 for fp64 queries ("wide"), without gaps.
#pragma once
#include "kernels/launch.h"
#include "kernels/philox.h"

namespace ds::kernels {

// [batch, heads, tokens, size]: the features of a token are neighbours; the members are the distances of the others, in
// elements.
struct AttentionOperand {
  const void* data;
  int64_t batch, head, token;
};

// Numbers that are added to scores, after the cap: data[b / inner * outer + b % inner * batch + h * head + i * query +
// j * key] for batch b, query head h, query i and key j. A distance of 0: the same number for all. `inner`, 1 or more:
// batches that follow each other at the distance `batch`.
struct AttentionBias {
  const void* data;  // null: none
  DType dtype;       // kF32, or that of the queries
  int64_t inner, outer, batch, head, query, key;
};
constexpr int kAttentionBiases = 2;

// Blocks of keys that each block of queries sees; blocks have `size` tokens, the last one may have fewer. Block q of
// the queries of head h sees the blocks list[start[h * heads + q]] to list[start[h * heads + q + 1] - 1], in ascending
// order. `heads`: the distance in `start` between heads; 0: all have the same blocks. The second pair of lists is the
// other way round: blocks of queries that see a block of keys.
struct AttentionBlocks {
  int64_t size;  // 0: all keys are seen
  const int32_t *start, *list;
  int64_t heads;
  const int32_t *reader_start, *readers;
  int64_t reader_heads;
};

struct AttentionShape {
  DType dtype;  // of queries, keys, values and the gradient of the output
  int64_t batch, heads, kv_heads, queries, keys, size, value_size;  // heads / kv_heads query heads in a row read one
  float scale;                                                      // of scores
  float soft_cap;  // scores are soft_cap * tanh(score / soft_cap); 0: as they are

  // Query i may see key j if all of the following rules permit it.
  bool causal;     // j <= i + offset
  int64_t offset;  // of the first query behind the first key
  int64_t window;  // j > i + offset - window; 0: no window
  // looks[b * looks_batch + i * looks_query + j] is not 0; null: any. looks_batch may be 0 (the same for all), and
  // looks_query, too (a padding of keys).
  const uint8_t* looks;
  int64_t looks_batch, looks_query;

  AttentionDropout dropout;  // of what values are multiplied by; totals are those of all

  AttentionBlocks blocks;
  AttentionBias bias[kAttentionBiases];
};

// Results of query rows so far: largest and total [batch, heads, queries], sum [batch, heads, queries, value_size].
// A row that has seen nothing has a largest score of -inf, and zeros. A row with a sink, a score that takes part in the
// total and has no value, begins with that score as the largest one, a total of 1 and zeros.
struct AttentionState {
  void *largest, *total, *sum;
};

struct AttentionKernels {
  uint32_t abi, size;

  // The rows see a block. `fresh`: they have seen nothing, and the state need not be set. The result of attention is
  // sum / total, and the lse of backward is largest + log(total).
  void (*forward)(const Launch&, const AttentionShape&, const AttentionOperand& query, const AttentionOperand& key,
                  const AttentionOperand& value, const AttentionState&, bool fresh);
  // into: what the rows of both have seen. `wide`: kF32 or kF64.
  void (*merge)(const Launch&, const AttentionState& into, const AttentionState& from, DType wide, size_t rows,
                size_t value_size);
  // Gradients from one block: of queries [batch, heads, queries, size], keys [batch, kv_heads, keys, size] and values
  // [batch, kv_heads, keys, value_size], each written whole. lse and row_sum are wide, [batch, heads, queries];
  // row_sum: of output * grad over the features. A row that has seen nothing may have any lse.
  void (*backward)(const Launch&, const AttentionShape&, const AttentionOperand& query, const AttentionOperand& key,
                   const AttentionOperand& value, const AttentionOperand& grad, const void* lse, const void* row_sum,
                   void* for_query, void* for_key, void* for_value);
  // The gradient of bias number `which`: wide, without gaps, of the lengths that bias_sizes() returns. Each number is
  // a sum over all scores to which it has been added, in one order.
  void (*bias_backward)(const Launch&, const AttentionShape&, const AttentionOperand& query,
                        const AttentionOperand& key, const AttentionOperand& value, const AttentionOperand& grad,
                        const void* lse, const void* row_sum, int which, void* for_bias);
};  // append only

constexpr uint32_t kAttentionAbi = 3;

// The keys [first, stop) of a block that query `row` may see by its position alone.
struct KeyRun {
  int64_t first, stop;
};
constexpr KeyRun keys_by_position(const AttentionShape& s, int64_t row) {
  const int64_t own = row + s.offset;
  const int64_t first = s.window > 0 && own - s.window + 1 > 0 ? own - s.window + 1 : 0;
  const int64_t stop = s.causal && own + 1 < s.keys ? (own + 1 > 0 ? own + 1 : 0) : s.keys;
  return {first, stop};
}

// The place of a number of a bias, in elements.
DS_HOST_DEVICE static inline int64_t bias_offset(const AttentionBias& bias, int64_t batch, int64_t head, int64_t row,
                                                 int64_t key) {
  return batch / bias.inner * bias.outer + batch % bias.inner * bias.batch + head * bias.head + row * bias.query +
         key * bias.key;
}

// Lengths of the gradient of a bias, which is 1 in dimensions in which the bias is the same; the two of a batch are
// `outer` and `inner`.
struct BiasSizes {
  int64_t outer, inner, heads, queries, keys;
};
DS_HOST_DEVICE static inline BiasSizes bias_sizes(const AttentionShape& s, int which) {
  const AttentionBias& b = s.bias[which];
  return {b.outer != 0 ? s.batch / b.inner : 1, b.batch != 0 ? b.inner : 1, b.head != 0 ? s.heads : 1,
          b.query != 0 ? s.queries : 1, b.key != 0 ? s.keys : 1};
}
DS_HOST_DEVICE static inline int64_t numel_of(const BiasSizes& n) {
  return n.outer * n.inner * n.heads * n.queries * n.keys;
}

// The blocks of keys of a row of one head, by their numbers; `all` where every key is seen.
struct ListedBlocks {
  const int32_t* list;
  int64_t count;
  bool all;
};
DS_HOST_DEVICE static inline ListedBlocks blocks_of(const AttentionShape& s, int64_t head, int64_t row) {
  const AttentionBlocks& b = s.blocks;
  if (b.size == 0) return {nullptr, 1, true};
  const int32_t* at = b.start + head * b.heads + row / b.size;
  return {b.list + at[0], at[1] - at[0], false};
}

}  // namespace ds::kernels

extern "C" {
// As ds_kernels() and its family in kernels/table.h.
__attribute__((visibility("default"))) const ds::kernels::AttentionKernels* ds_attention_kernels(uint32_t abi,
                                                                                                 const char* device);
__attribute__((visibility("default"))) const ds::kernels::AttentionKernels* ds_cpu_attention_kernels_isa(
    uint32_t abi, const char* isa);
__attribute__((visibility("default"))) const ds::kernels::AttentionKernels* ds_device_attention_kernels(uint32_t abi);
}

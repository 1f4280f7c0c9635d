#include "kernels/ref/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/ref/element.h"

namespace ds::kernels::ref {
namespace {

DType wide_of(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// The offset of a token's features.
int64_t offset_of(const AttentionOperand& x, int64_t batch, int64_t head, int64_t token) {
  return batch * x.batch + head * x.head + token * x.token;
}

double dot(DType dtype, const void* a, int64_t i, const void* b, int64_t j, int64_t size) {
  double sum = 0;
  for (int64_t f = 0; f < size; ++f) sum += load(a, dtype, i + f) * load(b, dtype, j + f);
  return sum;
}

bool may_see(const AttentionShape& s, int64_t batch, int64_t head, int64_t row, int64_t key) {
  const KeyRun run = keys_by_position(s, row);
  if (key < run.first || key >= run.stop) return false;
  const ListedBlocks blocks = blocks_of(s, head, row);
  if (!blocks.all && !std::count(blocks.list, blocks.list + blocks.count, key / s.blocks.size)) return false;
  return s.looks == nullptr || s.looks[batch * s.looks_batch + row * s.looks_query + key] != 0;
}

double capped(const AttentionShape& s, double score) {
  return s.soft_cap > 0 ? s.soft_cap * std::tanh(score / s.soft_cap) : score;
}

double bias_of(const AttentionShape& s, int64_t batch, int64_t head, int64_t row, int64_t key) {
  double sum = 0;
  for (const AttentionBias& bias : s.bias)
    if (bias.data != nullptr) sum += load(bias.data, bias.dtype, bias_offset(bias, batch, head, row, key));
  return sum;
}

double factor(const AttentionShape& s, int64_t batch, int64_t head, int64_t row, int64_t key) {
  return dropout_factor(s.dropout, static_cast<uint32_t>(batch), static_cast<uint32_t>(head),
                        static_cast<uint32_t>(row), static_cast<uint32_t>(key));
}

// A nan is larger than all.
double larger(double a, double b) { return b > a || std::isnan(b) ? b : a; }

template <typename Each>
void each_row(const AttentionShape& s, const Each& each) {
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t h = 0; h < s.heads; ++h)
      for (int64_t i = 0; i < s.queries; ++i)
        each(b, h, h / (s.heads / s.kv_heads), i, (b * s.heads + h) * s.queries + i);
}

}  // namespace

void attention_forward(const Launch&, const AttentionShape& s, const AttentionOperand& query,
                       const AttentionOperand& key, const AttentionOperand& value, const AttentionState& state,
                       bool fresh) {
  const DType wide = wide_of(s.dtype);
  std::vector<double> scores(s.keys);
  each_row(s, [&](int64_t b, int64_t h, int64_t kv, int64_t i, int64_t row) {
    const double before = fresh ? -INFINITY : load(state.largest, wide, row);
    double largest = before, total = fresh ? 0 : load(state.total, wide, row);
    for (int64_t j = 0; j < s.keys; ++j) {
      if (!may_see(s, b, h, i, j)) continue;
      scores[j] = capped(s, s.scale * dot(s.dtype, query.data, offset_of(query, b, h, i), key.data,
                                          offset_of(key, b, kv, j), s.size)) +
                  bias_of(s, b, h, i, j);
      largest = larger(largest, scores[j]);
    }
    const double shrink = before == -INFINITY ? 0 : std::exp(before - largest);
    const double level = largest == -INFINITY ? 0 : largest;  // every score may be -inf, by a bias
    total = shrink == 0 ? 0 : total * shrink;
    for (int64_t j = 0; j < s.keys; ++j) {
      if (may_see(s, b, h, i, j)) {
        total += scores[j] = std::exp(scores[j] - level);
        scores[j] *= factor(s, b, h, i, j);
      }
    }
    for (int64_t f = 0; f < s.value_size; ++f) {
      double sum = shrink == 0 ? 0 : load(state.sum, wide, row * s.value_size + f) * shrink;
      for (int64_t j = 0; j < s.keys; ++j)
        if (may_see(s, b, h, i, j)) sum += scores[j] * load(value.data, s.dtype, offset_of(value, b, kv, j) + f);
      store(state.sum, wide, row * s.value_size + f, sum);
    }
    store(state.largest, wide, row, largest);
    store(state.total, wide, row, total);
  });
}

void attention_merge(const Launch&, const AttentionState& into, const AttentionState& from, DType wide, size_t rows,
                     size_t value_size) {
  for (size_t row = 0; row < rows; ++row) {
    const double a = load(into.largest, wide, row), b = load(from.largest, wide, row), largest = larger(a, b);
    if (largest == -INFINITY) continue;
    const double keep = std::exp(a - largest), add = std::exp(b - largest);
    store(into.largest, wide, row, largest);
    store(into.total, wide, row, load(into.total, wide, row) * keep + load(from.total, wide, row) * add);
    for (size_t i = row * value_size; i < (row + 1) * value_size; ++i)
      store(into.sum, wide, i, load(into.sum, wide, i) * keep + load(from.sum, wide, i) * add);
  }
}

namespace {

// The values that backward computes for one query and one key: the factor of the value, and the gradients of the score
// with the biases and of the score before it was capped and scaled.
struct PairGradients {
  double used, biased, plain;
};
PairGradients pair_gradients(const AttentionShape& s, const AttentionOperand& query, const AttentionOperand& key,
                             const AttentionOperand& value, const AttentionOperand& grad, double lse, double row_sum,
                             int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t kv = h / (s.heads / s.kv_heads);
  const double score = capped(
      s, s.scale * dot(s.dtype, query.data, offset_of(query, b, h, i), key.data, offset_of(key, b, kv, j), s.size));
  const double p = std::exp(score + bias_of(s, b, h, i, j) - (lse == -INFINITY ? 0 : lse)),
               kept = factor(s, b, h, i, j);
  const double part =
      kept * dot(s.dtype, grad.data, offset_of(grad, b, h, i), value.data, offset_of(value, b, kv, j), s.value_size);
  const double slope = s.soft_cap > 0 ? 1 - (score / s.soft_cap) * (score / s.soft_cap) : 1;
  const double biased = p * (part - row_sum);
  return {p * kept, biased, biased * slope * s.scale};
}

}  // namespace

void attention_backward(const Launch&, const AttentionShape& s, const AttentionOperand& query,
                        const AttentionOperand& key, const AttentionOperand& value, const AttentionOperand& grad,
                        const void* lse, const void* row_sum, void* for_query, void* for_key, void* for_value) {
  const DType wide = wide_of(s.dtype);
  std::vector<double> keys(s.batch * s.kv_heads * s.keys * s.size),
      values(s.batch * s.kv_heads * s.keys * s.value_size);
  std::vector<double> queries(s.size);
  each_row(s, [&](int64_t b, int64_t h, int64_t kv, int64_t i, int64_t row) {
    const int64_t own = offset_of(query, b, h, i), upper = offset_of(grad, b, h, i);
    std::fill(queries.begin(), queries.end(), 0.0);
    for (int64_t j = 0; j < s.keys; ++j) {
      if (!may_see(s, b, h, i, j)) continue;
      const int64_t at = offset_of(key, b, kv, j), slot = (b * s.kv_heads + kv) * s.keys + j;
      const PairGradients found =
          pair_gradients(s, query, key, value, grad, load(lse, wide, row), load(row_sum, wide, row), b, h, i, j);
      for (int64_t f = 0; f < s.value_size; ++f)
        values[slot * s.value_size + f] += found.used * load(grad.data, s.dtype, upper + f);
      for (int64_t f = 0; f < s.size; ++f) {
        queries[f] += found.plain * load(key.data, s.dtype, at + f);
        keys[slot * s.size + f] += found.plain * load(query.data, s.dtype, own + f);
      }
    }
    for (int64_t f = 0; f < s.size; ++f) store(for_query, wide, row * s.size + f, queries[f]);
  });
  for (size_t i = 0; i < keys.size(); ++i) store(for_key, wide, i, keys[i]);
  for (size_t i = 0; i < values.size(); ++i) store(for_value, wide, i, values[i]);
}

void attention_bias_backward(const Launch&, const AttentionShape& s, const AttentionOperand& query,
                             const AttentionOperand& key, const AttentionOperand& value, const AttentionOperand& grad,
                             const void* lse, const void* row_sum, int which, void* for_bias) {
  const DType wide = wide_of(s.dtype);
  const BiasSizes n = bias_sizes(s, which);
  const int64_t inner = s.bias[which].inner;
  std::vector<double> sums(numel_of(n));
  each_row(s, [&](int64_t b, int64_t h, int64_t, int64_t i, int64_t row) {
    const int64_t block = (b / inner % n.outer * n.inner + b % inner % n.inner) * n.heads + h % n.heads;
    for (int64_t j = 0; j < s.keys; ++j)
      if (may_see(s, b, h, i, j))
        sums[(block * n.queries + i % n.queries) * n.keys + j % n.keys] +=
            pair_gradients(s, query, key, value, grad, load(lse, wide, row), load(row_sum, wide, row), b, h, i, j)
                .biased;
  });
  for (size_t i = 0; i < sums.size(); ++i) store(for_bias, wide, i, sums[i]);
}

}  // namespace ds::kernels::ref

// Problems of attention for tests: cases, their inputs, and what forward and backward of a table give for them.
#pragma once
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "support.h"

namespace ds::kernels::test {

enum class Looks { kAll, kPadding, kPairs, kNothing };

struct Case {
  int64_t batch, heads, kv_heads, queries, keys, size, value_size;
  bool causal = false;
  int64_t offset = 0, window = 0;
  Looks looks = Looks::kAll;
  float soft_cap = 0;
  double drop = 0;    // of probabilities
  int64_t block = 0;  // tokens of the blocks of a layout
  int biases[2] = {0, 0};
  int64_t inner = 1;
};
// Dimensions in which a bias is not the same.
enum Dims { kOuter = 1, kInner = 2, kHeads = 4, kQueries = 8, kKeys = 16, kSame = 32, kEvery = 31 };

// Sizes around registers, panels and tiles; every mask, a cap, dropout, layouts and biases; rows that see nothing.
inline const std::vector<Case> kCases = {
    {1, 1, 1, 1, 1, 1, 1},
    {1, 2, 1, 3, 17, 8, 8},
    {2, 4, 2, 17, 3, 40, 40, true, 1},
    {1, 3, 3, 65, 65, 64, 64, true},
    {1, 6, 2, 65, 17, 128, 128, false, 0, 0, Looks::kPadding},
    {2, 2, 1, 17, 65, 8, 40, true, 48, 0, Looks::kPairs},
    {1, 2, 2, 65, 65, 40, 8, true, 0, 7, Looks::kAll, 3},
    {2, 3, 1, 3, 65, 64, 1, false, 20, 9, Looks::kPadding, 2},
    {1, 2, 1, 65, 17, 16, 16, true, -20},
    {1, 1, 1, 17, 17, 8, 8, false, 0, 0, Looks::kNothing},
    {1, 1, 1, 300, 401, 24, 24, true, 101, 250, Looks::kPairs, 5},
    {2, 4, 2, 33, 37, 8, 9, true, 2, 0, Looks::kAll, 0, 0.25},
    {2, 3, 1, 19, 29, 5, 8, false, 0, 11, Looks::kPairs, 2, 0.5},
    {1, 2, 1, 270, 395, 8, 8, true, 125, 0, Looks::kPadding, 0, 0.9},
    {1, 3, 1, 65, 49, 8, 8, false, 0, 0, Looks::kAll, 0, 0, 16},
    {1, 2, 2, 300, 417, 16, 24, true, 117, 0, Looks::kPadding, 0, 0.2, 32},
    {2, 2, 1, 53, 61, 8, 5, true, 8, 20, Looks::kPairs, 3, 0, 7, {kEvery, kKeys}, 2},
    {1, 2, 2, 401, 390, 8, 8, false, 0, 0, Looks::kAll, 0, 0, 300, {0, kHeads | kQueries | kKeys}},
    {1, 1, 1, 33, 20, 8, 8, false, 0, 0, Looks::kPairs, 0, 0, 1},
    {6,
     2,
     2,
     19,
     35,
     8,
     8,
     false,
     0,
     0,
     Looks::kAll,
     0,
     0,
     0,
     {kOuter | kInner | kKeys, kOuter | kHeads | kQueries | kKeys},
     3},
    {2, 4, 2, 40, 19, 5, 9, true, -3, 0, Looks::kAll, 2, 0.3, 0, {kHeads | kQueries, kInner | kHeads}, 2},
    {4, 2, 1, 17, 40, 8, 8, false, 0, 0, Looks::kPairs, 0, 0, 0, {kSame, kInner | kQueries | kKeys}, 2},
    {1, 2, 2, 270, 200, 8, 8, true, 0, 0, Looks::kAll, 0, 0, 0, {kHeads | kQueries | kKeys, kKeys}},
};

inline std::string name(const Case& c, DType dtype, const char* isa) {
  return std::string(isa) + " " + dtype_name(dtype) + " case " + std::to_string(&c - kCases.data());
}

// The lists of a layout in which a third of all blocks are seen, and no block of the last row.
struct Lists {
  std::vector<int32_t> start, list;
  Lists() = default;
  template <typename Sees>
  Lists(int64_t heads, int64_t rows, int64_t columns, const Sees& sees) {
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t r = 0; r <= rows; ++r) {
        start.push_back(static_cast<int32_t>(list.size()));
        for (int64_t c = 0; r < rows && c < columns; ++c)
          if (sees(h, r, c)) list.push_back(static_cast<int32_t>(c));
      }
  }
};
struct Layout {
  int64_t block, rows, columns;
  Lists keys, readers;
  explicit Layout(const Case& c)
      : block(c.block),
        rows(block > 0 ? (c.queries + block - 1) / block : 0),
        columns(block > 0 ? (c.keys + block - 1) / block : 0) {
    if (block == 0) return;
    keys = Lists(c.heads, rows, columns, [&](int64_t h, int64_t r, int64_t k) { return sees(h, r, k); });
    readers = Lists(c.heads, columns, rows, [&](int64_t h, int64_t k, int64_t r) { return sees(h, r, k); });
  }
  bool sees(int64_t h, int64_t row, int64_t column) const {
    return rows == 1 || (row + 1 < rows && (row * 5 + column * 7 + h + row * column) % 3 != 1);
  }
};

// Inputs of a case, tokens before heads and with a gap behind each, and what the entries write.
struct Problem {
  AttentionShape shape = {};
  Buffer query, key, value, grad;
  std::vector<uint8_t> looks;
  DType wide;
  Layout layout;
  std::vector<Buffer> biases;

  Problem(const Case& c, DType dtype)
      : query(dtype, c.batch * c.queries * (c.heads * c.size + 1)),
        key(dtype, c.batch * c.keys * (c.kv_heads * c.size + 1)),
        value(dtype, c.batch * c.keys * (c.kv_heads * c.value_size + 1)),
        grad(dtype, c.batch * c.queries * (c.heads * c.value_size + 1)),
        looks(c.batch * c.queries * c.keys),
        wide(dtype == DType::kF64 ? DType::kF64 : DType::kF32),
        layout(c) {
    query.randomize(1), key.randomize(2), value.randomize(3), grad.randomize(4);
    shape.dtype = dtype;
    shape.batch = c.batch, shape.heads = c.heads, shape.kv_heads = c.kv_heads;
    shape.queries = c.queries, shape.keys = c.keys, shape.size = c.size, shape.value_size = c.value_size;
    shape.scale = 1 / std::sqrt(static_cast<float>(c.size)), shape.soft_cap = c.soft_cap;
    shape.causal = c.causal, shape.offset = c.offset, shape.window = c.window;
    if (c.drop > 0)
      shape.dropout = {0x123456789abcdefu,
                       static_cast<uint32_t>(c.drop * 4294967296.0),
                       static_cast<float>(1 / (1 - c.drop)),
                       3,
                       1000003,
                       70001};  // numbers of a block far inside
    if (c.block > 0)
      shape.blocks = {c.block,           layout.keys.start.data(),    layout.keys.list.data(),
                      layout.rows + 1,   layout.readers.start.data(), layout.readers.list.data(),
                      layout.columns + 1};
    for (int i = 0; i < kAttentionBiases; ++i) make_bias(c, i, i == 0 ? dtype : wide);
    for (size_t i = 0; i < biases.size(); ++i)
      shape.bias[i].data = shape.bias[i].inner > 0 ? biases[i].data() : nullptr;
    if (c.looks == Looks::kAll) return;
    for (size_t i = 0; i < looks.size(); ++i) looks[i] = c.looks != Looks::kNothing && (i * 7 + i / 5) % 3 != 0;
    shape.looks = looks.data();
    shape.looks_query = c.looks == Looks::kPadding ? 0 : c.keys;
    shape.looks_batch = c.looks == Looks::kPadding ? c.keys : c.queries * c.keys;
  }

  void make_bias(const Case& c, int which, DType dtype) {
    const int kind = c.biases[which];
    const int64_t lengths[] = {c.batch / c.inner, c.inner, c.heads, c.queries, c.keys};
    int64_t distances[5] = {}, numel = 1;
    for (int dim = 4; dim >= 0; --dim) {
      if ((kind & 1 << dim) == 0) continue;
      distances[dim] = numel;
      numel *= lengths[dim];
    }
    biases.emplace_back(dtype, numel);
    if (kind == 0) return;
    biases.back().randomize(17 + which);
    if (which == 0 && numel > 5) biases.back().set(5, -INFINITY);
    shape.bias[which] = {nullptr, dtype, c.inner, distances[0], distances[1], distances[2], distances[3], distances[4]};
  }
  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const bool later = shape.causal && j > i + shape.offset;
    const bool before = shape.window > 0 && j <= i + shape.offset - shape.window;
    if (later || before || (layout.block > 0 && !layout.sees(h, i / layout.block, j / layout.block))) return false;
    return shape.looks == nullptr || shape.looks[b * shape.looks_batch + i * shape.looks_query + j] != 0;
  }
  double bias(int64_t b, int64_t h, int64_t i, int64_t j) const {
    double sum = 0;
    for (int which = 0; which < kAttentionBiases; ++which)
      if (shape.bias[which].data != nullptr) sum += biases[which].get(bias_offset(shape.bias[which], b, h, i, j));
    return sum;
  }

  AttentionOperand operand(const void* data, int64_t tokens, int64_t heads, int64_t size) const {
    return {data, tokens * (heads * size + 1), size, heads * size + 1};
  }
  AttentionOperand q(const void* data) const { return operand(data, shape.queries, shape.heads, shape.size); }
  AttentionOperand k(const void* data) const { return operand(data, shape.keys, shape.kv_heads, shape.size); }
  AttentionOperand v(const void* data) const { return operand(data, shape.keys, shape.kv_heads, shape.value_size); }
  AttentionOperand g(const void* data) const { return operand(data, shape.queries, shape.heads, shape.value_size); }
  size_t rows() const { return shape.batch * shape.heads * shape.queries; }

  // Places of a query head and token, and of the key/value head that it reads.
  double at(const Buffer& x, AttentionOperand o, int64_t b, int64_t h, int64_t t, int64_t f) const {
    return x.get(b * o.batch + h * o.head + t * o.token + f);
  }
};

struct State {
  Buffer largest, total, sum;
  explicit State(const Problem& p)
      : largest(p.wide, p.rows()), total(p.wide, p.rows()), sum(p.wide, p.rows() * p.shape.value_size) {}
  AttentionState raw() { return {largest.data(), total.data(), sum.data()}; }
};

struct Gradients {
  Buffer query, key, value;
  std::vector<Buffer> biases;
  explicit Gradients(const Problem& p)
      : query(p.wide, p.rows() * p.shape.size),
        key(p.wide, p.shape.batch * p.shape.kv_heads * p.shape.keys * p.shape.size),
        value(p.wide, p.shape.batch * p.shape.kv_heads * p.shape.keys * p.shape.value_size) {
    for (int i = 0; i < kAttentionBiases; ++i)
      biases.emplace_back(p.wide, p.shape.bias[i].data != nullptr ? numel_of(bias_sizes(p.shape, i)) : 1);
  }
};

inline void forward(const AttentionKernels& kernels, const Launch& launch, Problem& p, State& state,
                    bool fresh = true) {
  kernels.forward(launch, p.shape, p.q(p.query.data()), p.k(p.key.data()), p.v(p.value.data()), state.raw(), fresh);
}
inline void backward(const AttentionKernels& kernels, const Launch& launch, Problem& p, Buffer& lse, Buffer& row_sum,
                     Gradients& to) {
  kernels.backward(launch, p.shape, p.q(p.query.data()), p.k(p.key.data()), p.v(p.value.data()), p.g(p.grad.data()),
                   lse.data(), row_sum.data(), to.query.data(), to.key.data(), to.value.data());
  for (int i = 0; i < kAttentionBiases; ++i)
    if (p.shape.bias[i].data != nullptr)
      kernels.bias_backward(launch, p.shape, p.q(p.query.data()), p.k(p.key.data()), p.v(p.value.data()),
                            p.g(p.grad.data()), lse.data(), row_sum.data(), i, to.biases[i].data());
}

// Batch, head and query of a row.
struct Row {
  int64_t b, h, i;
};
inline Row row_of(const AttentionShape& s, int64_t row) {
  return {row / s.queries / s.heads, row / s.queries % s.heads, row % s.queries};
}

// The part of a forward's state that backward is given.
inline void statistics(const Problem& p, const State& state, Buffer& lse, Buffer& row_sum) {
  const AttentionShape& s = p.shape;
  for (int64_t row = 0; row < static_cast<int64_t>(p.rows()); ++row) {
    const auto [b, h, i] = row_of(s, row);
    double sum = 0;
    const double total = state.total.get(row);
    for (int64_t f = 0; f < s.value_size && total > 0; ++f)
      sum += state.sum.get(row * s.value_size + f) / total * p.at(p.grad, p.g(nullptr), b, h, i, f);
    lse.set(row, state.largest.get(row) + std::log(total));
    row_sum.set(row, sum);
  }
}

// A forward and its backward.
struct Results {
  State state;
  Buffer lse, row_sum;
  Gradients grads;

  Results(const AttentionKernels& kernels, Problem& p)
      : state(p), lse(p.wide, p.rows()), row_sum(p.wide, p.rows()), grads(p) {
    forward(kernels, {}, p, state);
    statistics(p, state, lse, row_sum);
    backward(kernels, {}, p, lse, row_sum, grads);
  }
};

}  // namespace ds::kernels::test

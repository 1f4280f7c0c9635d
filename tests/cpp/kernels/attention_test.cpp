// Attention of blocks: the reference against a whole softmax, every instruction set and the GPU against the reference,
// blocks one after the other or merged against the whole.
#include "kernels/attention.h"

#include <memory>

#include "device.h"

namespace ds::kernels::test {
namespace {

const AttentionKernels* find_attention(const char* isa) { return ds_cpu_attention_kernels_isa(kAttentionAbi, isa); }
const AttentionKernels& ref_attention() { return *find_attention("ref"); }
auto isa_attention() { return of_each_isa(find_attention); }
auto isa_attention_and_ref() {
  auto all = isa_attention();
  all.push_back({"ref", &ref_attention()});
  return all;
}

enum class Looks { kAll, kPadding, kPairs, kNothing };

struct Case {
  int64_t batch, heads, kv_heads, queries, keys, size, value_size;
  bool causal = false;
  int64_t offset = 0, window = 0;
  Looks looks = Looks::kAll;
  float soft_cap = 0;
  double drop = 0;  // of probabilities
};
// Sizes around registers, panels and tiles; every mask, a cap and dropout; rows that see nothing.
const std::vector<Case> kCases = {
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
};

std::string name(const Case& c, DType dtype, const char* isa) {
  return std::string(isa) + " " + dtype_name(dtype) + " case " + std::to_string(&c - kCases.data());
}

// Inputs of a case, tokens before heads and with a gap behind each, and what the entries write.
struct Problem {
  AttentionShape shape = {};
  Buffer query, key, value, grad;
  std::vector<uint8_t> looks;
  DType wide;

  Problem(const Case& c, DType dtype)
      : query(dtype, c.batch * c.queries * (c.heads * c.size + 1)),
        key(dtype, c.batch * c.keys * (c.kv_heads * c.size + 1)),
        value(dtype, c.batch * c.keys * (c.kv_heads * c.value_size + 1)),
        grad(dtype, c.batch * c.queries * (c.heads * c.value_size + 1)),
        looks(c.batch * c.queries * c.keys),
        wide(dtype == DType::kF64 ? DType::kF64 : DType::kF32) {
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
    if (c.looks == Looks::kAll) return;
    for (size_t i = 0; i < looks.size(); ++i) looks[i] = c.looks != Looks::kNothing && (i * 7 + i / 5) % 3 != 0;
    shape.looks = looks.data();
    shape.looks_query = c.looks == Looks::kPadding ? 0 : c.keys;
    shape.looks_batch = c.looks == Looks::kPadding ? c.keys : c.queries * c.keys;
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
  explicit Gradients(const Problem& p)
      : query(p.wide, p.rows() * p.shape.size),
        key(p.wide, p.shape.batch * p.shape.kv_heads * p.shape.keys * p.shape.size),
        value(p.wide, p.shape.batch * p.shape.kv_heads * p.shape.keys * p.shape.value_size) {}
};

void forward(const AttentionKernels& kernels, const Launch& launch, Problem& p, State& state, bool fresh = true) {
  kernels.forward(launch, p.shape, p.q(p.query.data()), p.k(p.key.data()), p.v(p.value.data()), state.raw(), fresh);
}
void backward(const AttentionKernels& kernels, const Launch& launch, Problem& p, Buffer& lse, Buffer& row_sum,
              Gradients& to) {
  kernels.backward(launch, p.shape, p.q(p.query.data()), p.k(p.key.data()), p.v(p.value.data()), p.g(p.grad.data()),
                   lse.data(), row_sum.data(), to.query.data(), to.key.data(), to.value.data());
}

// Batch, head and query of a row.
struct Row {
  int64_t b, h, i;
};
Row row_of(const AttentionShape& s, int64_t row) {
  return {row / s.queries / s.heads, row / s.queries % s.heads, row % s.queries};
}

// The part of a forward's state that backward is given.
void statistics(const Problem& p, const State& state, Buffer& lse, Buffer& row_sum) {
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

void expect_close(const Buffer& got, const Buffer& want, double terms, const std::string& where) {
  ASSERT_TRUE(got.canary_intact()) << where;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got.get(i) == want.get(i)) continue;  // infinities, too
    ASSERT_NEAR(got.get(i), want.get(i), 2e-6 * (std::abs(want.get(i)) + std::sqrt(terms))) << where << " at " << i;
  }
}
void expect_equal(const State& got, const State& want, double terms, const std::string& where) {
  expect_close(got.largest, want.largest, 1, where + " largest");
  expect_close(got.total, want.total, terms, where + " total");
  expect_close(got.sum, want.sum, terms, where + " sum");
}
void expect_equal(const Gradients& got, const Gradients& want, double terms, const std::string& where) {
  expect_close(got.query, want.query, terms, where + " of queries");
  expect_close(got.key, want.key, terms, where + " of keys");
  expect_close(got.value, want.value, terms, where + " of values");
}

// Attention as it is written down, and its loss: the sum of output * grad.
class Whole {
 public:
  // sinks: a score of each head that takes part in the total and has no value.
  explicit Whole(const Problem& p, std::vector<double> sinks = {}) : p_(p), s_(p.shape), sinks_(std::move(sinks)) {}

  std::vector<double> probabilities(int64_t b, int64_t h, int64_t i, double* lse) const {
    std::vector<double> out(s_.keys, 0.0);
    double total = sinks_.empty() ? 0 : std::exp(sinks_[h]);
    for (int64_t j = 0; j < s_.keys; ++j) {
      const bool later = s_.causal && j > i + s_.offset, before = s_.window > 0 && j <= i + s_.offset - s_.window;
      if (later || before) continue;
      if (s_.looks != nullptr && s_.looks[b * s_.looks_batch + i * s_.looks_query + j] == 0) continue;
      double score = 0;
      for (int64_t f = 0; f < s_.size; ++f)
        score += p_.at(p_.query, p_.q(nullptr), b, h, i, f) *
                 p_.at(p_.key, p_.k(nullptr), b, h * s_.kv_heads / s_.heads, j, f) * s_.scale;
      if (s_.soft_cap > 0) score = s_.soft_cap * std::tanh(score / s_.soft_cap);
      total += out[j] = std::exp(score);
    }
    for (double& x : out) x = total > 0 ? x / total : 0;
    *lse = std::log(total);
    return out;
  }
  double output(int64_t b, int64_t h, int64_t i, int64_t f, const std::vector<double>& probs) const {
    double sum = 0;
    for (int64_t j = 0; j < s_.keys; ++j)
      sum += probs[j] * dropout_factor(s_.dropout, b, h, i, j) *
             p_.at(p_.value, p_.v(nullptr), b, h * s_.kv_heads / s_.heads, j, f);
    return sum;
  }
  double loss() const {
    double sum = 0, lse;
    for (int64_t b = 0; b < s_.batch; ++b)
      for (int64_t h = 0; h < s_.heads; ++h)
        for (int64_t i = 0; i < s_.queries; ++i) {
          const std::vector<double> probs = probabilities(b, h, i, &lse);
          for (int64_t f = 0; f < s_.value_size; ++f)
            sum += output(b, h, i, f, probs) * p_.at(p_.grad, p_.g(nullptr), b, h, i, f);
        }
    return sum;
  }

 private:
  const Problem& p_;
  const AttentionShape& s_;
  std::vector<double> sinks_;
};

TEST(AttentionTest, TheReferenceIsASoftmaxAndItsDerivative) {
  for (const Case& c : kCases) {
    if (c.queries * c.keys > 5000) continue;
    Problem p(c, DType::kF64);
    const AttentionShape& s = p.shape;
    const auto [state, lse_given, row_sum, grads] = Results(ref_attention(), p);
    const Whole whole(p);
    for (int64_t row = 0; row < static_cast<int64_t>(p.rows()); ++row) {
      const auto [b, h, i] = row_of(s, row);
      double lse;
      const std::vector<double> probs = whole.probabilities(b, h, i, &lse);
      const double total = state.total.get(row);
      if (std::isinf(lse)) {
        ASSERT_EQ(total, 0) << name(c, s.dtype, "ref") << " row " << row;
        ASSERT_EQ(state.largest.get(row), -INFINITY) << name(c, s.dtype, "ref") << " row " << row;
      } else {
        ASSERT_NEAR(state.largest.get(row) + std::log(total), lse, 1e-9) << name(c, s.dtype, "ref") << " row " << row;
      }
      for (int64_t f = 0; f < s.value_size; ++f)
        ASSERT_NEAR(total > 0 ? state.sum.get(row * s.value_size + f) / total : 0, whole.output(b, h, i, f, probs),
                    1e-9)
            << name(c, s.dtype, "ref") << " row " << row;
    }
    const auto slope = [&](Buffer& of, size_t i) {
      const double x = of.get(i), step = 1e-5;
      of.set(i, x + step);
      const double up = whole.loss();
      of.set(i, x - step);
      const double down = whole.loss();
      of.set(i, x);
      return (up - down) / (2 * step);
    };
    // One element of each: of the last head's last token but one.
    const int64_t t = std::max<int64_t>(s.queries - 2, 0), u = std::max<int64_t>(s.keys - 2, 0), b = s.batch - 1;
    const int64_t h = s.heads - 1, kv = s.kv_heads - 1;
    const AttentionOperand q = p.q(nullptr), k = p.k(nullptr), v = p.v(nullptr);
    const std::string where = name(c, s.dtype, "ref");
    ASSERT_NEAR(grads.query.get(((b * s.heads + h) * s.queries + t) * s.size),
                slope(p.query, b * q.batch + h * q.head + t * q.token), 1e-6)
        << where;
    ASSERT_NEAR(grads.key.get(((b * s.kv_heads + kv) * s.keys + u) * s.size),
                slope(p.key, b * k.batch + kv * k.head + u * k.token), 1e-6)
        << where;
    ASSERT_NEAR(grads.value.get(((b * s.kv_heads + kv) * s.keys + u) * s.value_size),
                slope(p.value, b * v.batch + kv * v.head + u * v.token), 1e-6)
        << where;
  }
}

// The published vectors (Random123's kat_vectors).
TEST(AttentionTest, PhiloxGivesThePublishedBits) {
  const auto words = [](PhiloxBits counter, uint64_t seed) {
    const PhiloxBits bits = philox(counter, seed);
    return std::vector<uint32_t>(bits.word, bits.word + 4);
  };
  EXPECT_EQ(words({{0, 0, 0, 0}}, 0), (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(words({{~0u, ~0u, ~0u, ~0u}}, ~uint64_t{0}),
            (std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(words({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822),
            (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(AttentionTest, SoManyAreDroppedAndEachByItsOwnNumbers) {
  const AttentionDropout drop = {77, static_cast<uint32_t>(0.3 * 4294967296.0), static_cast<float>(1 / 0.7), 0, 0, 0};
  int64_t dropped = 0, like_neighbour = 0, like_head = 0, like_batch = 0;
  for (uint32_t i = 0; i < 200; ++i)
    for (uint32_t j = 0; j < 200; ++j) {
      const float own = dropout_factor(drop, 1, 2, i, j);
      dropped += own == 0;
      like_neighbour += own == dropout_factor(drop, 1, 2, i + 1, j);
      like_head += own == dropout_factor(drop, 1, 3, i, j);
      like_batch += own == dropout_factor(drop, 2, 2, i, j);
    }
  EXPECT_NEAR(dropped / 4e4, 0.3, 0.01);
  for (int64_t same : {like_neighbour, like_head, like_batch}) EXPECT_NEAR(same / 4e4, 0.7 * 0.7 + 0.3 * 0.3, 0.015);
  EXPECT_EQ(dropout_factor({}, 1, 2, 3, 4), 1);
}

TEST(AttentionTest, RowsThatBeginWithASink) {
  for (const Case& c : kCases) {
    if (c.queries * c.keys > 5000) continue;
    for (const auto& isa : isa_attention_and_ref()) {
      Problem p(c, DType::kF32);
      const AttentionShape& s = p.shape;
      std::vector<double> sinks(c.heads);
      for (int64_t h = 0; h < c.heads; ++h) sinks[h] = 0.75 * h - 0.5;
      State state(p);
      for (size_t row = 0; row < p.rows(); ++row) {
        state.largest.set(row, sinks[row / s.queries % s.heads]), state.total.set(row, 1);
        for (int64_t f = 0; f < s.value_size; ++f) state.sum.set(row * s.value_size + f, 0);
      }
      forward(*isa.kernels, {}, p, state, false);
      Buffer lse(p.wide, p.rows()), row_sum(p.wide, p.rows());
      statistics(p, state, lse, row_sum);
      const Whole whole(p, sinks);
      double slope = 0;  // of the last head's sink
      for (int64_t row = 0; row < static_cast<int64_t>(p.rows()); ++row) {
        const auto [b, h, i] = row_of(s, row);
        double level;
        const std::vector<double> probs = whole.probabilities(b, h, i, &level);
        ASSERT_NEAR(lse.get(row), level, 1e-5) << name(c, s.dtype, isa.isa) << " row " << row;
        for (int64_t f = 0; f < s.value_size; ++f)
          ASSERT_NEAR(state.sum.get(row * s.value_size + f) / state.total.get(row), whole.output(b, h, i, f, probs),
                      1e-5)
              << name(c, s.dtype, isa.isa) << " row " << row;
        if (h == c.heads - 1) slope -= std::exp(sinks[h] - lse.get(row)) * row_sum.get(row);
      }
      std::vector<double> up = sinks, down = sinks;
      up.back() += 1e-4, down.back() -= 1e-4;
      ASSERT_NEAR(slope, (Whole(p, up).loss() - Whole(p, down).loss()) / 2e-4, 1e-4) << name(c, s.dtype, isa.isa);
    }
  }
}

TEST(AttentionTest, InstructionSetsEqualTheReference) {
  ThreadPool pool(3);
  for (const Case& c : kCases) {
    for (DType dtype : kDtypes) {
      Problem p(c, dtype);
      Results want(ref_attention(), p);
      for (const auto& isa : isa_attention()) {
        State got(p);
        forward(*isa.kernels, {&pool}, p, got);
        const double terms = static_cast<double>(c.keys + c.queries * c.heads / c.kv_heads);
        expect_equal(got, want.state, terms, name(c, dtype, isa.isa));
        Gradients grads(p);
        backward(*isa.kernels, {&pool}, p, want.lse, want.row_sum, grads);
        expect_equal(grads, want.grads, terms, name(c, dtype, isa.isa));
      }
    }
  }
}

TEST(AttentionTest, ThreadsDoNotChangeTheBits) {
  const Case c = {1, 4, 2, 350, 201, 40, 40, true, -50, 0, Looks::kAll, 0, 0.1};
  Problem p(c, DType::kF32);
  const AttentionKernels& kernels = *ds_attention_kernels(kAttentionAbi, "cpu");
  Results want(kernels, p);
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    State got(p);
    Gradients grads(p);
    forward(kernels, {&pool}, p, got);
    backward(kernels, {&pool}, p, want.lse, want.row_sum, grads);
    EXPECT_TRUE(same(got.sum, want.state.sum) && same(got.total, want.state.total)) << threads;
    EXPECT_TRUE(same(got.largest, want.state.largest) && same(grads.query, want.grads.query)) << threads;
    EXPECT_TRUE(same(grads.key, want.grads.key) && same(grads.value, want.grads.value)) << threads;
  }
}

// Blocks of keys of one problem: `part` is given the keys [first, stop) and where they begin.
template <typename Part>
void in_blocks(Problem& p, const std::vector<int64_t>& stops, const Part& part) {
  const AttentionShape whole = p.shape;
  int64_t first = 0;
  for (int64_t stop : stops) {
    p.shape.keys = stop - first;
    p.shape.offset = whole.offset - first;
    p.shape.dropout.key = whole.dropout.key + static_cast<uint32_t>(first);
    if (p.shape.looks != nullptr) p.shape.looks = whole.looks + first;
    part(first);
    first = stop;
  }
  p.shape = whole;
}

TEST(AttentionTest, BlocksAndMergedBlocksEqualTheWhole) {
  for (const Case& c : kCases) {
    if (c.keys < 17) continue;
    Problem p(c, DType::kF32);
    const AttentionShape whole = p.shape;
    State want(p);
    forward(ref_attention(), {}, p, want);
    for (const auto& isa : isa_attention_and_ref()) {
      State seen(p), merged(p);
      bool fresh = true;
      in_blocks(p, {1, 9, c.keys}, [&](int64_t first) {
        AttentionOperand k = p.operand(p.key.data(), whole.keys, whole.kv_heads, whole.size),
                         v = p.operand(p.value.data(), whole.keys, whole.kv_heads, whole.value_size);
        k.data = static_cast<const float*>(k.data) + first * k.token;
        v.data = static_cast<const float*>(v.data) + first * v.token;
        State alone(p);
        isa.kernels->forward({}, p.shape, p.q(p.query.data()), k, v, seen.raw(), fresh);
        isa.kernels->forward({}, p.shape, p.q(p.query.data()), k, v, fresh ? merged.raw() : alone.raw(), true);
        if (!fresh) isa.kernels->merge({}, merged.raw(), alone.raw(), p.wide, p.rows(), c.value_size);
        fresh = false;
      });
      expect_equal(seen, want, static_cast<double>(c.keys), name(c, DType::kF32, isa.isa) + " in blocks");
      expect_equal(merged, want, static_cast<double>(c.keys), name(c, DType::kF32, isa.isa) + " merged");
    }
  }
}

TEST(AttentionTest, ANanIsNotLost) {
  const Case c = {1, 1, 1, 40, 30, 8, 8};
  for (const auto& isa : isa_attention_and_ref()) {
    Problem p(c, DType::kF32);
    p.query.set(3 * 9, NAN);
    State state(p);
    forward(*isa.kernels, {}, p, state);
    p.query.set(3 * 9, 0);
    forward(*isa.kernels, {}, p, state, false);
    for (int64_t row = 0; row < c.queries; ++row)
      EXPECT_EQ(std::isnan(state.sum.get(row * 8) / state.total.get(row)), row == 3) << isa.isa << " row " << row;
  }
}

TEST(AttentionTest, TheTableOfADeviceIsFound) {
  EXPECT_EQ(ds_attention_kernels(kAttentionAbi, "cpu"),
            ds_cpu_attention_kernels_isa(kAttentionAbi, ds_cpu_kernels(kKernelAbi)->isa));
  EXPECT_EQ(ds_attention_kernels(kAttentionAbi + 1, "cpu"), nullptr);
  EXPECT_EQ(ds_attention_kernels(kAttentionAbi, "abacus"), nullptr);
  if (ds_kernels(kKernelAbi, "cuda") == nullptr) return;
  const AttentionKernels* cuda = ds_attention_kernels(kAttentionAbi, "cuda");
  ASSERT_NE(cuda, nullptr);
  EXPECT_EQ(cuda->size, sizeof(AttentionKernels));
  EXPECT_EQ(ds_attention_kernels(kAttentionAbi + 1, "cuda"), nullptr);
}

using CudaAttentionTest = CudaTest;
TEST_F(CudaAttentionTest, EqualsTheReference) {
  const AttentionKernels& cuda = *ds_attention_kernels(kAttentionAbi, "cuda");
  for (const Case& c : kCases) {
    if (cuda_runs_on_cpu() && c.batch * c.heads * c.queries * c.keys > 5000) continue;
    for (DType dtype : kDtypes) {
      Problem p(c, dtype);
      auto [want, lse, row_sum, want_grads] = Results(ref_attention(), p);
      State got(p);
      Gradients grads(p);
      Buffer looks(DType::kF32, (p.looks.size() + 3) / 4);
      std::memcpy(looks.data(), p.looks.data(), p.looks.size());
      OnDevice q(driver, p.query), k(driver, p.key), v(driver, p.value), g(driver, p.grad), l(driver, lse),
          r(driver, row_sum), seen(driver, looks), largest(driver, got.largest), total(driver, got.total),
          sum(driver, got.sum), for_query(driver, grads.query), for_key(driver, grads.key),
          for_value(driver, grads.value);
      AttentionShape shape = p.shape;
      if (shape.looks != nullptr) shape.looks = static_cast<const uint8_t*>(seen.data());
      const AttentionState state = {largest.data(), total.data(), sum.data()};
      const double terms = static_cast<double>(c.keys + c.queries * c.heads / c.kv_heads);
      // Twice the same keys: twice the totals. Then merged with itself.
      cuda.forward({}, shape, p.q(q.data()), p.k(k.data()), p.v(v.data()), state, true);
      largest.fetch(), total.fetch(), sum.fetch();
      expect_equal(got, want, terms, name(c, dtype, "cuda"));
      cuda.forward({}, shape, p.q(q.data()), p.k(k.data()), p.v(v.data()), state, false);
      State twice = want;
      ref_attention().merge({}, twice.raw(), want.raw(), p.wide, p.rows(), c.value_size);
      largest.fetch(), total.fetch(), sum.fetch();
      expect_equal(got, twice, 2 * terms, name(c, dtype, "cuda") + " again");
      cuda.merge({}, state, state, p.wide, p.rows(), c.value_size);
      State four = twice;
      ref_attention().merge({}, four.raw(), twice.raw(), p.wide, p.rows(), c.value_size);
      largest.fetch(), total.fetch(), sum.fetch();
      expect_equal(got, four, 4 * terms, name(c, dtype, "cuda") + " merged");
      cuda.backward({}, shape, p.q(q.data()), p.k(k.data()), p.v(v.data()), p.g(g.data()), l.data(), r.data(),
                    for_query.data(), for_key.data(), for_value.data());
      for_query.fetch(), for_key.fetch(), for_value.fetch();
      expect_no_error();
      expect_equal(grads, want_grads, terms, name(c, dtype, "cuda"));
    }
  }
}

}  // namespace
}  // namespace ds::kernels::test

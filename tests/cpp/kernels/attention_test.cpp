// Attention of blocks: the reference against a whole softmax, every instruction set and the GPU against the reference,
// blocks one after the other or merged against the whole.
#include "kernels/attention.h"

#include <memory>

#include "attention_problem.h"
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
  for (size_t i = 0; i < want.biases.size(); ++i)
    expect_close(got.biases[i], want.biases[i], terms * 4, where + " of bias " + std::to_string(i));
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
      if (!p_.sees(b, h, i, j)) continue;
      double score = 0;
      for (int64_t f = 0; f < s_.size; ++f)
        score += p_.at(p_.query, p_.q(nullptr), b, h, i, f) *
                 p_.at(p_.key, p_.k(nullptr), b, h * s_.kv_heads / s_.heads, j, f) * s_.scale;
      if (s_.soft_cap > 0) score = s_.soft_cap * std::tanh(score / s_.soft_cap);
      total += out[j] = std::exp(score + p_.bias(b, h, i, j));
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
    for (int i = 0; i < kAttentionBiases; ++i) {
      const size_t numel = p.shape.bias[i].data != nullptr ? grads.biases[i].size() : 0;
      for (size_t at : {size_t{0}, numel / 2, numel - 1})
        if (at < numel && std::isfinite(p.biases[i].get(at))) {
          ASSERT_NEAR(grads.biases[i].get(at), slope(p.biases[i], at), 1e-6) << where << " bias " << i << " at " << at;
        }
    }
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
  const Case cases[] = {
      {1, 4, 2, 350, 201, 40, 40, true, -50, 0, Looks::kAll, 0, 0.1},
      {2, 2, 2, 350, 201, 40, 40, false, 0, 0, Looks::kAll, 0, 0, 50, {kHeads | kQueries | kKeys, kInner | kKeys}, 2},
  };
  for (const Case& c : cases) {
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
      for (int i = 0; i < kAttentionBiases; ++i)
        EXPECT_TRUE(same(grads.biases[i], want.grads.biases[i])) << threads << " bias " << i;
    }
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
    if (c.keys < 17 || c.block > 0 || c.biases[0] != 0 || c.biases[1] != 0) continue;
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
      std::vector<Buffer> lists;
      for (const auto* one :
           {&p.layout.keys.start, &p.layout.keys.list, &p.layout.readers.start, &p.layout.readers.list}) {
        lists.emplace_back(DType::kF32, one->size() + 1);  // a device has no memory of no size
        std::memcpy(lists.back().data(), one->data(), one->size() * sizeof(int32_t));
      }
      OnDevice keys_start(driver, lists[0]), keys_list(driver, lists[1]), readers_start(driver, lists[2]),
          readers(driver, lists[3]), first(driver, p.biases[0]), second(driver, p.biases[1]),
          for_first(driver, grads.biases[0]), for_second(driver, grads.biases[1]);
      shape.blocks.start = static_cast<const int32_t*>(keys_start.data());
      shape.blocks.list = static_cast<const int32_t*>(keys_list.data());
      shape.blocks.reader_start = static_cast<const int32_t*>(readers_start.data());
      shape.blocks.readers = static_cast<const int32_t*>(readers.data());
      if (shape.bias[0].data != nullptr) shape.bias[0].data = first.data();
      if (shape.bias[1].data != nullptr) shape.bias[1].data = second.data();
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
      for (int i = 0; i < kAttentionBiases; ++i)
        if (shape.bias[i].data != nullptr)
          cuda.bias_backward({}, shape, p.q(q.data()), p.k(k.data()), p.v(v.data()), p.g(g.data()), l.data(), r.data(),
                             i, i == 0 ? for_first.data() : for_second.data());
      for_query.fetch(), for_key.fetch(), for_value.fetch(), for_first.fetch(), for_second.fetch();
      expect_no_error();
      expect_equal(grads, want_grads, terms, name(c, dtype, "cuda"));
    }
  }
}

}  // namespace
}  // namespace ds::kernels::test

// The softmax over a vocabulary that ranks share against torch's over all words: sums and gradients, uneven slices, a
// rank without words, ignored and wrong targets, half types, the gradient in place of the logits. Ranks are threads.
#include "parallel/vocab_softmax.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "../error_of.h"
#include "../on_threads.h"
#include "comm/transports/thread_communicator.h"

namespace ds::parallel {
namespace {

using torch::autograd::grad;

constexpr int64_t kRows = 7, kIgnored = -100;

at::Tensor values(int64_t rows, int64_t columns) {
  return (at::arange(rows * columns, at::kDouble) * 1.7).sin().view({rows, columns}) * 5;
}

at::Tensor some_targets(int64_t words) {
  const at::Tensor found = at::arange(kRows) * 3 % words;
  found[2].fill_(kIgnored);
  return found;
}

void with_slices(int ranks, int64_t words, const std::function<void(const VocabSlice&)>& body) {
  const auto between = comm::thread_communicators(ranks);
  on_threads(ranks, [&](int rank) {
    const int64_t each = (words + ranks - 1) / ranks;
    body({between[rank], std::min(words, each * rank), std::min(words, each * (rank + 1)), words});
  });
}

struct Case {
  int ranks;
  int64_t words;
  at::ScalarType type;
  double bound;
};

class VocabSumsOverRanks : public testing::TestWithParam<Case> {};

TEST_P(VocabSumsOverRanks, EqualTheWhole) {
  const auto [ranks, words, type, bound] = GetParam();
  const at::Tensor targets = some_targets(words), counts = targets.ne(kIgnored);
  const at::Tensor whole = values(kRows, words).to(type).to(at::kDouble).set_requires_grad(true);
  const at::Tensor picked = whole.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1).masked_fill(~counts, 0);
  const at::Tensor factors = at::arange(1, kRows + 1, at::kDouble);
  const at::Tensor loss = (at::logsumexp(whole, 1) * factors - picked * 2 + whole.sum(1) * 0.01).sum();
  const at::Tensor wanted = grad({loss}, {whole})[0];
  for (const bool overwrite : {false, true})
    with_slices(ranks, words, [&, type = type, bound = bound](const VocabSlice& slice) {
      const int64_t width = slice.stop - slice.start;
      const at::Tensor own = whole.detach().narrow(1, slice.start, width).to(type, false, true);
      own.set_requires_grad(true);
      const VocabSums made = vocab_sums(slice, own, targets, kIgnored, overwrite);
      const at::Tensor total = (made.normalizers * factors - made.picked * 2 + made.totals * 0.01).sum();
      EXPECT_NEAR(total.item<double>(), loss.item<double>(), bound * 100);
      const at::Tensor found = grad({total}, {own})[0];
      EXPECT_EQ(found.scalar_type(), type);
      EXPECT_TRUE(at::allclose(found.to(at::kDouble), wanted.narrow(1, slice.start, width), bound, bound));
      EXPECT_EQ(width > 0 && found.data_ptr() == own.data_ptr(), width > 0 && overwrite);
    });
}

INSTANTIATE_TEST_SUITE_P(Worlds, VocabSumsOverRanks,
                         testing::Values(Case{1, 11, at::kDouble, 1e-12}, Case{2, 11, at::kDouble, 1e-12},
                                         Case{3, 11, at::kFloat, 1e-5}, Case{4, 5, at::kDouble, 1e-12},
                                         Case{3, 1001, at::kBFloat16, 2e-2}));

TEST(VocabSums, LargeLogitsStayFinite) {
  with_slices(2, 6, [](const VocabSlice& slice) {
    const at::Tensor logits = at::full({1, 3}, slice.start == 0 ? 1e4 : -1e4, at::kFloat);
    const VocabSums made = vocab_sums(slice, logits, at::zeros({1}, at::kLong), kIgnored, false);
    EXPECT_FLOAT_EQ(made.normalizers[0].item<float>(), 1e4f + std::log(3.0f));
  });
}

TEST(VocabSums, EveryRankNamesAWrongTarget) {
  with_slices(2, 6, [](const VocabSlice& slice) {
    const at::Tensor targets = at::tensor({1, 6}, at::kLong);
    const std::string told = error_of([&] { vocab_sums(slice, at::zeros({2, 3}), targets, kIgnored, false); });
    EXPECT_NE(told.find("target 6 is not one of the 6 words"), std::string::npos) << told;
  });
}

TEST(VocabSums, ShapesThatDoNotFitAreNamed) {
  with_slices(1, 6, [](const VocabSlice& slice) {
    const std::string told = error_of([&] {
      vocab_sums(slice, at::zeros({2, 5}), at::zeros({2}, at::kLong), kIgnored, false);
    });
    EXPECT_NE(told.find("do not fit"), std::string::npos) << told;
  });
}

TEST(VocabSums, SecondDerivativesAreRefused) {
  with_slices(1, 6, [](const VocabSlice& slice) {
    const at::Tensor logits = values(2, 6).set_requires_grad(true);
    const at::Tensor sum = vocab_sums(slice, logits, at::zeros({2}, at::kLong), kIgnored, false).normalizers.sum();
    const std::string told = error_of([&] { grad({sum}, {logits}, {}, true, true); });
    EXPECT_NE(told.find("second derivative"), std::string::npos) << told;
  });
}

}  // namespace
}  // namespace ds::parallel

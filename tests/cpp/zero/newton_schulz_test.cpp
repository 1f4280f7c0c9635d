#include "zero/step/newton_schulz.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace ds::zero {
namespace {

// The iteration in fp64, with plain loops and in its own words: singular values by singular values.
at::Tensor oracle(const at::Tensor& update, int steps) {
  const at::Tensor matrix = update.to(at::kDouble).reshape({update.size(0), -1});
  const auto [u, s, v] = at::svd(matrix / (matrix.norm() + 1e-7));
  at::Tensor sigma = s.clone();
  for (int step = 0; step < steps; ++step) {
    for (int64_t i = 0; i < sigma.numel(); ++i) {
      const double x = sigma[i].item<double>();
      sigma[i] = 3.4445 * x - 4.7750 * x * x * x + 2.0315 * std::pow(x, 5);
    }
  }
  const double ratio = static_cast<double>(matrix.size(0)) / static_cast<double>(matrix.size(1));
  return (u * sigma).mm(v.t()).reshape(update.sizes()) * std::sqrt(std::max(1.0, ratio));
}

double distance(const at::Tensor& got, const at::Tensor& want) {
  return ((got.to(at::kDouble) - want).norm() / want.norm()).item<double>();
}

constexpr NewtonSchulzForm kForms[] = {NewtonSchulzForm::kStandard, NewtonSchulzForm::kGram};

TEST(NewtonSchulzTest, BothFormsEqualFp64) {
  at::manual_seed(1);
  const int64_t shapes[][2] = {{1, 1},   {1, 7},    {7, 1},    {2, 3},   {16, 16},
                               {31, 33}, {10, 100}, {100, 10}, {64, 96}, {96, 64}};
  for (const auto& shape : shapes) {
    for (NewtonSchulzForm form : kForms) {
      for (int steps : {1, 2, 5}) {
        const at::Tensor update = at::randn({shape[0], shape[1]});
        const at::Tensor want = oracle(update, steps);
        NewtonSchulz{steps, form, {}}.apply(update);
        EXPECT_LT(distance(update, want), 2e-5) << shape[0] << "x" << shape[1] << " steps " << steps;
      }
    }
  }
}

TEST(NewtonSchulzTest, SingularValuesEndNearOne) {
  at::manual_seed(2);
  for (NewtonSchulzForm form : kForms) {
    // Singular values over three orders of magnitude.
    const at::Tensor u = std::get<0>(at::svd(at::randn({40, 40}))), v = std::get<0>(at::svd(at::randn({80, 40})));
    const at::Tensor update = (u * at::logspace(0, -2.5, 40)).mm(v.t());
    NewtonSchulz{5, form, {}}.apply(update);
    const at::Tensor s = std::get<1>(at::svd(update));
    EXPECT_GT(s.min().item<double>(), 0.5);
    EXPECT_LT(s.max().item<double>(), 1.25);
  }
}

TEST(NewtonSchulzTest, ScaleDoesNotMatter) {
  at::manual_seed(3);
  const at::Tensor small = at::randn({8, 24}) * 1e-3, large = small * 1e12;
  NewtonSchulz{}.apply(small);
  NewtonSchulz{}.apply(large);
  EXPECT_LT(distance(small, large.to(at::kDouble)), 1e-3);
}

TEST(NewtonSchulzTest, FiltersAreRowsAndVectorsColumns) {
  at::manual_seed(4);
  const at::Tensor filter = at::randn({6, 3, 5, 5});
  const at::Tensor want = oracle(filter, 5);
  const at::Tensor last = filter.contiguous(at::MemoryFormat::ChannelsLast).clone();
  NewtonSchulz{}.apply(filter);
  NewtonSchulz{}.apply(last);
  EXPECT_LT(distance(filter, want), 2e-5);
  EXPECT_LT(distance(last, want), 2e-5);
  EXPECT_TRUE(last.is_contiguous(at::MemoryFormat::ChannelsLast));
  // A view in a larger buffer, as an engine has it.
  const at::Tensor buffer = at::randn({100});
  const at::Tensor before = buffer.clone(), part = buffer.narrow(0, 7, 60).view({5, 12});
  const at::Tensor goal = oracle(part, 5);
  NewtonSchulz{}.apply(part);
  EXPECT_LT(distance(part, goal), 2e-5);
  EXPECT_TRUE(buffer.narrow(0, 0, 7).equal(before.narrow(0, 0, 7)));
  EXPECT_TRUE(buffer.narrow(0, 67, 33).equal(before.narrow(0, 67, 33)));
}

TEST(NewtonSchulzTest, ZeroEmptyAndNotFinite) {
  for (NewtonSchulzForm form : kForms) {
    const NewtonSchulz iteration{5, form, {}};
    const at::Tensor zero = at::zeros({4, 9}), empty = at::zeros({0, 9}), none = at::zeros({9, 0});
    iteration.apply(zero);
    iteration.apply(empty);
    iteration.apply(none);
    EXPECT_TRUE(zero.equal(at::zeros({4, 9})));
    for (float bad : {INFINITY, NAN}) {
      const at::Tensor update = at::ones({4, 9});
      update[1][2] = bad;
      iteration.apply(update);
      EXPECT_TRUE(update.isnan().any().item<bool>());
    }
  }
}

// Sums in fp64, rounded once to `type`, as fp64 numbers.
at::Tensor rounded_once(const at::Tensor& sum, at::ScalarType type) { return sum.to(type).to(at::kDouble); }

// The standard form whose 16-bit products are as exact as their results can be.
at::Tensor with_exact_products(const at::Tensor& update, int steps, at::ScalarType type) {
  at::Tensor x = rounded_once(at::div(update, at::add(update.norm(), 1e-7)), type);
  for (int step = 0; step < steps; ++step) {
    const at::Tensor gram = rounded_once(x.mm(x.t()), type);
    const at::Tensor polynomial = rounded_once(2.0315 * gram.mm(gram) - 4.7750 * gram, type);
    x = rounded_once(polynomial.mm(x) + 3.4445 * x, type);
  }
  return x;
}

// Torch's own products of these types on the CPU may add in 16 bits, or be missing.
TEST(NewtonSchulzTest, HalfPrecisionProductsAddInFp32) {
  at::manual_seed(5);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor drawn = at::randn({32, 4096});
    for (int steps : {1, 5}) {
      const at::Tensor update = drawn.clone();
      NewtonSchulz{steps, NewtonSchulzForm::kGram, type}.apply(update);
      EXPECT_LT(distance(update, with_exact_products(drawn, steps, type)), type == at::kHalf ? 1e-3 : 1e-2)
          << type << " steps " << steps;
      EXPECT_LT(distance(update, oracle(drawn, steps)), type == at::kHalf ? 1e-2 : 5e-2) << type << " steps " << steps;
    }
  }
}

TEST(NewtonSchulzTest, CostCountsOperations) {
  const NewtonSchulz standard{5, NewtonSchulzForm::kStandard, {}}, gram{5, NewtonSchulzForm::kGram, {}};
  EXPECT_EQ(standard.cost(10, 10), 5 * 6 * 1000);
  EXPECT_EQ(gram.cost(10, 10), standard.cost(10, 10));  // the standard form is cheaper there
  EXPECT_EQ(gram.cost(10, 100), 4 * 10000 + 34 * 1000);
  EXPECT_EQ(gram.cost(100, 10), gram.cost(10, 100));
  EXPECT_EQ(gram.cost(0, 10), 0);
  EXPECT_GT(gram.cost(int64_t{1} << 40, int64_t{1} << 40), 0);
}

}  // namespace
}  // namespace ds::zero

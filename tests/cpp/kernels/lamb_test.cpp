// LAMB in numbers; that every instruction set gives the bits of the reference is tests/cpp/optim/rules_test.cpp.
#include "kernels/lamb.h"

#include "support.h"

namespace ds::kernels::test {
namespace {

// Parameter, moments and gradient of one fp32 tensor.
using Tensor = MomentTensor;

LambArgs default_args(double step) {
  auto args = args_with_moments<LambArgs>(step, 1e-6);
  args.min_ratio = 0.01;
  args.max_ratio = 10;
  return args;
}

void pass(const KernelTable& table, const char* name, const UpdateSegment& segment, const LambArgs& args,
          const StepScale* scale = nullptr) {
  run_pass(table, name, segment, lamb_constants(args), scale);
}

void step(const KernelTable& table, Tensor& tensor, const LambArgs& args, const StepScale* scale = nullptr) {
  tensor.sums[0] = tensor.sums[1] = 0;
  pass(table, "lamb_moments", tensor.segment(), args, scale);
  pass(table, "lamb", tensor.segment(), args, scale);
}

// Two pieces of a parameter, as two ranks hold them, give the update of the whole.
TEST(LambTest, PiecesOfAParameterAddUp) {
  for (const KernelTable* table : isa_tables()) {
    Tensor whole(30011, 7), cut = whole;
    const LambArgs args = default_args(1);
    step(*table, whole, args);
    const size_t first = 12345, numel = cut.master.size();
    pass(*table, "lamb_moments", cut.segment(0, first), args);
    pass(*table, "lamb_moments", cut.segment(first, numel), args);
    for (int i = 0; i < kLambSums; ++i) EXPECT_NEAR(cut.sums[i] / whole.sums[i], 1, 1e-14);
    pass(*table, "lamb", cut.segment(0, first), args);
    pass(*table, "lamb", cut.segment(first, numel), args);
    for (size_t i = 0; i < numel; ++i)
      ASSERT_NEAR(cut.master.get(i), whole.master.get(i), 1e-8 + 1e-7 * std::abs(whole.master.get(i)));
  }
}

TEST(LambTest, RatiosAreClampedAndOneForZeroNorms) {
  const double sums[][2] = {{4, 1},   {0, 1},   {1, 0},   {0, 0},        {1, 1e8},
                            {1e8, 1}, {NAN, 1}, {1, NAN}, {INFINITY, 1}, {1, INFINITY}};
  const double want[] = {2, 1, 1, 1, 0.01, 10, NAN, NAN, 10, 0.01};
  for (int i = 0; i < 10; ++i) {
    const double got = lamb_ratio(sums[i], 0.01, 10);
    EXPECT_TRUE(got == want[i] || (std::isnan(got) && std::isnan(want[i]))) << i << ": " << got;
  }
}

TEST(LambTest, ASkippedStepTouchesNothing) {
  const StepScale skip = {INFINITY, 1.0f, 1};
  std::vector<const KernelTable*> tables = isa_tables();
  tables.push_back(&ref_table());
  for (const KernelTable* table : tables) {
    Tensor want(1000, 5), got = want;
    step(*table, got, default_args(1), &skip);
    EXPECT_TRUE(same(got.master, want.master) && same(got.exp_avg, want.exp_avg));
    EXPECT_TRUE(same(got.exp_avg_sq, want.exp_avg_sq));
    EXPECT_EQ(got.sums[0], 0);
    EXPECT_EQ(got.sums[1], 0);
  }
}

// The published arithmetic in fp64: raw moments, bias correction outside the ratio.
struct Oracle {
  std::vector<double> p, m, v;

  void step(const std::vector<double>& grad, const LambArgs& a) {
    std::vector<double> u(p.size());
    double w_norm = 0, u_norm = 0;
    for (size_t i = 0; i < p.size(); ++i) {
      m[i] = a.beta1 * m[i] + (1 - a.beta1) * grad[i];
      v[i] = a.beta2 * v[i] + (1 - a.beta2) * grad[i] * grad[i];
      u[i] = a.eps_inside_sqrt ? m[i] / std::sqrt(v[i] + a.eps) : m[i] / (std::sqrt(v[i]) + a.eps);
      u[i] += a.weight_decay * p[i];
      w_norm += p[i] * p[i];
      u_norm += u[i] * u[i];
    }
    double ratio = 1;
    if (w_norm > 0 && u_norm > 0) ratio = std::min(std::max(std::sqrt(w_norm / u_norm), a.min_ratio), a.max_ratio);
    const double rate = a.lr * std::sqrt(a.bias_correction2) / a.bias_correction1;
    for (size_t i = 0; i < p.size(); ++i) p[i] -= rate * ratio * u[i];
  }
};

TEST(LambTest, AThousandStepsStayWithin1e6OfFp64AndOneWithinTwoUlp) {
  for (const KernelTable* table : isa_tables()) {
    for (bool inside : {true, false}) {
      Tensor t(257, 41);
      const std::vector<double> none(257);
      Oracle oracle{t.master.values(), none, none};
      for (int n = 1; n <= 1000; ++n) {
        const std::vector<double> grads = t.draw_gradients(1000 + n);
        LambArgs args = default_args(n);
        args.eps_inside_sqrt = inside;
        const std::vector<double> before = oracle.p;
        step(*table, t, args);
        oracle.step(grads, args);
        for (size_t i = 0; n == 1 && i < grads.size(); ++i)
          ASSERT_LE(ulps(t.master.get(i), oracle.p[i], before[i]), 2) << table->isa << " " << i;
      }
      EXPECT_LE(relative_error(t.master, oracle.p), 1e-6) << table->isa << " eps inside " << inside;
    }
  }
}

}  // namespace
}  // namespace ds::kernels::test

#include "support.h"

namespace ds::kernels::test {
namespace {

// Parameter, moments, gradient and 16-bit copy of one tensor.
struct Tensor {
  Buffer master, exp_avg, exp_avg_sq, grad, lp;

  Tensor(size_t n, const AdamArgs& args, unsigned seed, size_t offset = 0)
      : master(args.master_dtype, n, offset),
        exp_avg(args.state_dtype, n, offset),
        exp_avg_sq(args.state_dtype, n, offset),
        grad(args.grad_dtype, n, offset),
        lp(args.lp_dtype, n, offset) {
    master.randomize(seed);
    exp_avg.randomize(seed + 1, 0.1);
    exp_avg_sq.randomize(seed + 2, 0.1);
    for (size_t i = 0; i < n; ++i) exp_avg_sq.set(i, std::abs(exp_avg_sq.get(i)));
    grad.randomize(seed + 3);
    lp.randomize(seed + 4);
  }
  AdamSegment segment(bool with_lp) {
    return {master.data(), exp_avg.data(), exp_avg_sq.data(), grad.data(), with_lp ? lp.data() : nullptr,
            master.size()};
  }
};

AdamArgs default_args() {
  AdamArgs args = {};
  args.lr = 1e-3;
  args.beta1 = 0.9;
  args.beta2 = 0.999;
  args.eps = 1e-8;
  args.weight_decay = 0.01;
  args.bias_correction1 = 1 - std::pow(0.9, 3);
  args.bias_correction2 = 1 - std::pow(0.999, 3);
  args.adamw = true;
  args.grad_dtype = DType::kF32;
  args.lp_dtype = DType::kBF16;
  return args;
}

testing::AssertionResult same(const Tensor& got, const Tensor& want) {
  using ds::kernels::test::same;
  if (auto r = same(got.master, want.master); !r) return r << " (master)";
  if (auto r = same(got.exp_avg, want.exp_avg); !r) return r << " (exp_avg)";
  if (auto r = same(got.exp_avg_sq, want.exp_avg_sq); !r) return r << " (exp_avg_sq)";
  if (auto r = same(got.grad, want.grad); !r) return r << " (grad)";
  return same(got.lp, want.lp) << " (lp)";
}

TEST(AdamTest, EveryIsaDtypeAndSizeEqualsTheReference) {
  ThreadPool pool(3);
  const StepScale scale = {0, 0.7f, 0};
  for (const KernelTable* table : isa_tables()) {
    for (DType grad : kDtypes) {
      for (DType lp : kDtypes) {
        for (int mode = 0; mode < 4; ++mode) {
          AdamArgs args = default_args();
          args.grad_dtype = grad;
          args.lp_dtype = lp;
          args.adamw = mode & 1;
          for (size_t n : {0, 1, 3, 15, 16, 17, 33, 1025, 40001}) {
            Tensor want(n, args, 11, mode), got = want;
            if (mode >= 2) {  // with special gradients
              want.grad.add_specials();
              got.grad.add_specials();
            }
            const AdamSegment a = want.segment(mode != 3), b = got.segment(mode != 3);
            ref_table().adam({}, &a, 1, args, &scale);
            table->adam({&pool}, &b, 1, args, &scale);
            EXPECT_TRUE(same(got, want)) << where(*table, grad, lp, n, mode);
          }
        }
      }
    }
  }
}

TEST(AdamTest, WeightsAndMomentsOfAnyDtype) {
  ThreadPool pool(2);
  for (const KernelTable* table : isa_tables()) {
    for (DType master : kDtypes) {
      for (DType state : kDtypes) {
        AdamArgs args = default_args();
        args.master_dtype = master;
        args.state_dtype = state;
        args.grad_dtype = master;
        for (size_t n : {1, 1023, 1024, 1025, 40000}) {
          Tensor want(n, args, 23, 1), got = want;
          const AdamSegment a = want.segment(true), b = got.segment(true);
          ref_table().adam({}, &a, 1, args, nullptr);
          table->adam({&pool}, &b, 1, args, nullptr);
          EXPECT_TRUE(same(got, want)) << where(*table, master, state, n, 1);
        }
      }
    }
  }
}

TEST(AdamTest, ManySegmentsEqualOneByOne) {
  const AdamArgs args = default_args();
  for (const KernelTable* table : isa_tables()) {
    for (int threads : {1, 2, 5}) {
      ThreadPool pool(threads);
      std::vector<Tensor> want, got;
      std::vector<AdamSegment> segments;
      for (size_t n : {5, 0, 8192, 1, 0, 20001, 3, 9000, 64, 0}) want.emplace_back(n, args, unsigned(n), n % 4);
      got = std::vector<Tensor>(want.begin(), want.end());
      for (Tensor& t : got) segments.push_back(t.segment(true));
      for (Tensor& t : want) {
        const AdamSegment s = t.segment(true);
        ref_table().adam({}, &s, 1, args, nullptr);
      }
      table->adam({&pool}, segments.data(), segments.size(), args, nullptr);
      for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(same(got[i], want[i])) << table->isa << " segment " << i;
    }
  }
}

TEST(AdamTest, ASkippedStepTouchesNothing) {
  const AdamArgs args = default_args();
  const StepScale skip = {INFINITY, 1.0f, 1};
  for (const KernelTable* table : isa_tables()) {
    Tensor want(1000, args, 5), got = want;
    const AdamSegment s = got.segment(true);
    table->adam({}, &s, 1, args, &skip);
    EXPECT_TRUE(same(got, want));
  }
}

// The formulas of kernels/adam.h in fp64.
struct Oracle {
  std::vector<double> p, m, v;

  void step(const std::vector<double>& grad, const AdamArgs& a) {
    for (size_t i = 0; i < p.size(); ++i) {
      double g = grad[i];
      if (!a.adamw) g += a.weight_decay * p[i];
      m[i] = a.beta1 * m[i] + (1 - a.beta1) * g;
      v[i] = a.beta2 * v[i] + (1 - a.beta2) * g * g;
      const double update =
          a.lr / a.bias_correction1 * m[i] / (std::sqrt(v[i]) / std::sqrt(a.bias_correction2) + a.eps);
      p[i] -= update + (a.adamw ? a.lr * a.weight_decay * p[i] : 0);
    }
  }
};

// Distance in units of the last place of the larger of the two numbers that the update adds.
double ulps(float got, double want, double before) {
  const float scale = static_cast<float>(std::max(std::abs(want), std::abs(before)));
  const double ulp = std::nextafterf(scale, INFINITY) - static_cast<double>(scale);
  return std::abs(got - want) / ulp;
}

TEST(AdamTest, OneStepIsWithinTwoUlpOfFp64) {
  for (const KernelTable* table : isa_tables()) {
    for (bool adamw : {true, false}) {
      AdamArgs args = default_args();
      args.adamw = adamw;
      args.bias_correction1 = 1 - args.beta1;
      args.bias_correction2 = 1 - args.beta2;
      Tensor t(10007, args, 31);
      Oracle oracle;
      std::vector<double> grads, before;
      for (size_t i = 0; i < t.master.size(); ++i) {
        t.exp_avg.set(i, 0);
        t.exp_avg_sq.set(i, 0);
        before.push_back(t.master.get(i));
        grads.push_back(t.grad.get(i));
      }
      oracle.p = before;
      oracle.m = oracle.v = std::vector<double>(before.size());
      const AdamSegment s = t.segment(false);
      table->adam({}, &s, 1, args, nullptr);
      oracle.step(grads, args);
      for (size_t i = 0; i < before.size(); ++i) {
        ASSERT_LE(ulps(t.master.get(i), oracle.p[i], before[i]), 2) << table->isa << " " << i << " p " << before[i];
        if (!adamw) continue;  // g + w * p may cancel: its relative error has no bound
        ASSERT_LE(ulps(t.exp_avg.get(i), oracle.m[i], 0), 2) << table->isa;
        ASSERT_LE(ulps(t.exp_avg_sq.get(i), oracle.v[i], 0), 4) << table->isa << " " << i;  // three roundings
      }
    }
  }
}

TEST(AdamTest, AThousandStepsStayWithin1e6OfFp64) {
  for (const KernelTable* table : isa_tables()) {
    for (bool adamw : {true, false}) {
      AdamArgs args = default_args();
      args.adamw = adamw;
      Tensor t(257, args, 41);
      Oracle oracle;
      for (size_t i = 0; i < t.master.size(); ++i) {
        oracle.p.push_back(t.master.get(i));
        oracle.m.push_back(0);
        oracle.v.push_back(0);
        t.exp_avg.set(i, 0);
        t.exp_avg_sq.set(i, 0);
      }
      std::vector<double> grads(t.master.size());
      for (int step = 1; step <= 1000; ++step) {
        t.grad.randomize(1000 + step);
        for (size_t i = 0; i < grads.size(); ++i) {
          t.grad.set(i, t.grad.get(i) + 0.3);  // a direction, so that the parameters travel
          grads[i] = t.grad.get(i);
        }
        args.bias_correction1 = 1 - std::pow(args.beta1, step);
        args.bias_correction2 = 1 - std::pow(args.beta2, step);
        const AdamSegment s = t.segment(false);
        table->adam({}, &s, 1, args, nullptr);
        oracle.step(grads, args);
      }
      double error = 0, norm = 0;
      for (size_t i = 0; i < grads.size(); ++i) {
        error += std::pow(t.master.get(i) - oracle.p[i], 2);
        norm += std::pow(oracle.p[i], 2);
      }
      EXPECT_LE(std::sqrt(error / norm), 1e-6) << table->isa << " adamw " << adamw;
    }
  }
}

TEST(AdamTest, UnscalesGradientsInTheSamePass) {
  AdamArgs args = default_args();
  for (const KernelTable* table : isa_tables()) {
    Tensor plain(1000, args, 51), scaled = plain;
    for (size_t i = 0; i < 1000; ++i) scaled.grad.set(i, plain.grad.get(i) * 65536);
    const StepScale scale = {0, 1.0f / 65536, 0};
    const AdamSegment a = plain.segment(true), b = scaled.segment(true);
    table->adam({}, &a, 1, args, nullptr);
    table->adam({}, &b, 1, args, &scale);
    EXPECT_TRUE(ds::kernels::test::same(scaled.master, plain.master)) << table->isa;
    EXPECT_TRUE(ds::kernels::test::same(scaled.lp, plain.lp)) << table->isa;
  }
}

}  // namespace
}  // namespace ds::kernels::test

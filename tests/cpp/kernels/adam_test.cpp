// Adam in numbers; that every instruction set gives the bits of the reference is tests/cpp/optim/rules_test.cpp.
#include "kernels/adam.h"

#include "support.h"

namespace ds::kernels::test {
namespace {

using Tensor = MomentTensor;

void adam(const KernelTable& table, Tensor& tensor, const AdamArgs& args, const StepScale* scale = nullptr) {
  run_pass(table, "adam", tensor.segment(), adam_constants(args), scale);
}

AdamArgs default_args() {
  auto args = args_with_moments<AdamArgs>(3, 1e-8);
  args.adamw = true;
  return args;
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

TEST(AdamTest, OneStepIsWithinTwoUlpOfFp64) {
  for (const KernelTable* table : isa_tables()) {
    for (bool adamw : {true, false}) {
      AdamArgs args = default_args();
      args.adamw = adamw;
      args.bias_correction1 = 1 - args.beta1;
      args.bias_correction2 = 1 - args.beta2;
      Tensor t(10007, 31);
      const std::vector<double> before = t.master.values(), none(before.size());
      Oracle oracle{before, none, none};
      adam(*table, t, args);
      oracle.step(t.grad.values(), args);
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
      Tensor t(257, 41);
      const std::vector<double> none(257);
      Oracle oracle{t.master.values(), none, none};
      for (int step = 1; step <= 1000; ++step) {
        const std::vector<double> grads = t.draw_gradients(1000 + step);
        args.bias_correction1 = 1 - std::pow(args.beta1, step);
        args.bias_correction2 = 1 - std::pow(args.beta2, step);
        adam(*table, t, args);
        oracle.step(grads, args);
      }
      EXPECT_LE(relative_error(t.master, oracle.p), 1e-6) << table->isa << " adamw " << adamw;
    }
  }
}

TEST(AdamTest, UnscalesGradientsInTheSamePass) {
  const AdamArgs args = default_args();
  for (const KernelTable* table : isa_tables()) {
    Tensor plain(1000, 51), scaled = plain;
    for (size_t i = 0; i < 1000; ++i) scaled.grad.set(i, plain.grad.get(i) * 65536);
    const StepScale scale = {0, 1.0f / 65536, 0};
    adam(*table, plain, args);
    adam(*table, scaled, args, &scale);
    EXPECT_TRUE(same(scaled.master, plain.master)) << table->isa;
  }
}

}  // namespace
}  // namespace ds::kernels::test

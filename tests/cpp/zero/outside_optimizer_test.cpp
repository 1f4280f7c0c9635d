// Optimizers that live outside of the engine: they get gradients in each step, and may fail.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "small_engine.h"
#include "zero/engine.h"

namespace ds::zero {
namespace {

// An optimizer that lives outside gets unscaled, clipped gradients, and what it writes goes to the model.
TEST(OutsideOptimizer, IsCalledInTheStep) {
  at::Tensor weight = at::ones({4}, at::kBFloat16).set_requires_grad(true);
  EngineOptions options;
  options.grad_dtype = at::kFloat;
  auto engine = engine_of({{weight, "w", 0, 0}}, options);
  engine->states().refresh_master();
  int called = 0;
  for (double factor : {1.0, HUGE_VAL}) {
    run_backward(*engine, (weight * 4.0 * factor).sum());
    StepInputs inputs;
    inputs.loss_scale = 2.0f;
    inputs.max_norm = 1.0f;
    inputs.check = true;
    inputs.masters = engine->states().pieces(StateKind::kMaster, 0);
    inputs.outside = [&] {
      at::NoGradGuard no_grad;
      ++called;
      EXPECT_TRUE(at::allclose(inputs.masters[0].grad(), at::full({4}, 0.5), 1e-5, 1e-6));  // norm 4, clipped to 1
      inputs.masters[0].sub_(inputs.masters[0].grad());
    };
    const StepReport report = engine->step(inputs);
    EXPECT_EQ(report.skipped, !std::isfinite(factor));
    EXPECT_FALSE(inputs.masters[0].grad().defined());
    EXPECT_TRUE(at::allclose(weight.detach().to(at::kFloat), at::full({4}, 0.5), 1e-5, 1e-6));
  }
  EXPECT_EQ(called, 1);
}

// An error in the update of an optimizer that lives outside leaves the gradients for another try, in both forms of
// masters: the parameters themselves, whose .grad shows the buffer, and copies of 16-bit ones.
TEST(OutsideOptimizer, MayTryAgainAfterAFailure) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    at::Tensor weight = at::ones({4}, dtype).set_requires_grad(true);
    EngineOptions options;
    options.grad_dtype = at::kFloat;
    auto engine = engine_of({{weight, "w", 0, 0}}, options);
    engine->states().refresh_master();
    run_backward(*engine, (weight * 4.0).sum());
    StepInputs inputs;
    inputs.loss_scale = 2.0f;
    inputs.max_norm = 1.0f;
    inputs.masters =
        dtype == at::kFloat ? std::vector<at::Tensor>{weight} : engine->states().pieces(StateKind::kMaster, 0);
    int called = 0;
    inputs.outside = [&] {
      at::NoGradGuard no_grad;
      EXPECT_TRUE(at::allclose(inputs.masters[0].grad(), at::full({4}, 0.5), 1e-5, 1e-6)) << called;
      if (++called < 3) throw std::runtime_error("no");
      inputs.masters[0].sub_(inputs.masters[0].grad());
    };
    for (int failures = 0; failures < 2; ++failures) EXPECT_THROW(engine->step(inputs), std::runtime_error);
    EXPECT_NEAR(engine->step(inputs).norm, 4.0, 1e-5);
    EXPECT_TRUE(at::allclose(weight.detach().to(at::kFloat), at::full({4}, 0.5), 1e-5, 1e-6));
  }
}

}  // namespace
}  // namespace ds::zero

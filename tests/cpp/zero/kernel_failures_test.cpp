// Kernels that cannot be launched and kernels that have no memory, as on a GPU, played on the CPU: a table that fails
// on order, and torch's own allocator asked for more than there is. Nothing may be updated anywhere then, and every
// rank must know.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../error_of.h"
#include "base/error.h"
#include "trained_ranks.h"
#include "zero/engine.h"

namespace ds::zero {
namespace {

// The failures of this thread's next kernels; like CUDA's last error, a thread's own.
struct Orders {
  bool fail_copies = false, no_memory = false;
  const char* error = nullptr;
};
Orders& orders() {
  static thread_local Orders mine;
  return mine;
}

const kernels::KernelTable& real() { return *ds_kernels(kernels::kKernelAbi, "cpu"); }

bool launched() {
  if (orders().fail_copies) orders().error = "invalid configuration argument";
  return !orders().fail_copies;
}

kernels::KernelTable failing_table() {
  kernels::KernelTable table = real();
  table.copy = [](const kernels::Launch& launch, void* dst, DType to, const void* src, DType from, size_t n, float x) {
    if (launched()) real().copy(launch, dst, to, src, from, n, x);
  };
  table.accumulate = [](const kernels::Launch& launch, void* dst, DType to, const void* src, DType from, size_t n,
                        float x) {
    if (launched()) real().accumulate(launch, dst, to, src, from, n, x);
  };
  // As kernels/cuda/norm.cu: without scratch it does nothing.
  table.sum_squares = [](const kernels::Launch& launch, const kernels::Segment* segments, size_t count, DType dtype,
                         double* sum) {
    const size_t bytes = orders().no_memory ? size_t{1} << 60 : 16;
    if (launch.scratch->allocate(bytes) != nullptr) real().sum_squares(launch, segments, count, dtype, sum);
  };
  table.last_error = [] { return std::exchange(orders().error, nullptr); };
  return table;
}

constexpr int kWorld = 2;

// One rank: a model of one weight, larger than what is moved without a kernel.
struct Rank {
  int rank;
  at::Tensor weight = at::ones({3000}).set_requires_grad(true);
  kernels::KernelTable table = failing_table();
  std::shared_ptr<Engine> engine;

  Rank(int stage, const comm::ProcessMeshPtr& mesh) : rank(mesh->rank({"dp"})) {
    EngineOptions options;
    options.policy = stage_policy(stage);
    options.kernels = &table;
    options.gatherer.persistence_numel = 1 << 20;
    options.reducer.predivide = 1.0f / kWorld;
    engine = engine_of({{weight, "weight", 0, 0}}, options, mesh);
    use_adam(*engine);
  }

  // In a thread of its own, as autograd's are: what fails there is not this thread's last error.
  void backward(bool failing) {
    engine->backward().begin(true);
    const at::Tensor loss = (weight * weight).sum();
    std::thread([&] {
      orders().fail_copies = failing;
      loss.backward();
    }).join();
    engine->backward().end();
  }
  void step() { engine->step(adam_inputs(0.0f, false, 1, {0.1, 0.9, 0.99, 1e-8, 0.0})); }
};

void on_ranks(int stage, const std::function<void(Rank&)>& body) {
  train_on<int>(kWorld, [&](const comm::ProcessMeshPtr& mesh) {
    Rank made(stage, mesh);
    body(made);
    return 0;
  });
}

class KernelFailures : public testing::TestWithParam<int> {};

TEST_P(KernelFailures, InAHookEveryRankDropsTheGradients) {
  on_ranks(GetParam(), [](Rank& one) {
    const std::string said = failure_of([&] { one.backward(one.rank == 1); });
    EXPECT_TRUE(says(said, one.rank == 1 ? "[rank 1] invalid configuration argument" : "rank 1 could not compute"))
        << one.rank << ": " << said;
    EXPECT_FALSE(one.engine->grads().any());
    one.backward(false);  // and goes on
    one.step();
    EXPECT_TRUE(at::allclose(one.weight.detach(), at::full({3000}, 0.9), 1e-5, 1e-6)) << one.weight[0];
  });
}

TEST_P(KernelFailures, ABackwardThatRaisesOnOneRankFailsOnAll) {
  on_ranks(GetParam(), [](Rank& one) {
    for (const bool launched : {false, true}) {
      one.engine->backward().begin(true);
      if (one.rank == 0 || launched) (one.weight * one.weight).sum().backward();
      if (one.rank == 1) {
        EXPECT_FALSE(one.engine->backward().abort_together());
      } else {
        EXPECT_TRUE(says(failure_of([&] { one.engine->backward().end(); }), "rank 1 could not compute"));
      }
      EXPECT_FALSE(one.engine->grads().any());
    }
    one.backward(false);  // and goes on
    one.step();
    EXPECT_TRUE(at::allclose(one.weight.detach(), at::full({3000}, 0.9), 1e-5, 1e-6)) << one.weight[0];
  });
}

TEST_P(KernelFailures, ANormWithoutMemoryUpdatesNothingAnywhere) {
  on_ranks(GetParam(), [](Rank& one) {
    one.backward(false);
    orders().no_memory = one.rank == 1;
    const std::string said = failure_of([&] { one.step(); });
    EXPECT_TRUE(says(said, one.rank == 1 ? "[rank 1] a kernel had no memory for its" : "rank 1 could not compute"))
        << one.rank << ": " << said;
    EXPECT_TRUE(at::equal(one.weight.detach(), at::ones({3000})));
    EXPECT_EQ(one.engine->stepper().steps()[0].item<float>(), 0.0f);
    orders().no_memory = false;  // somebody has freed some: the same gradients make the step
    one.step();
    EXPECT_TRUE(at::allclose(one.weight.detach(), at::full({3000}, 0.9), 1e-5, 1e-6)) << one.weight[0];
    EXPECT_EQ(one.engine->stepper().steps()[0].item<float>(), 1.0f);
  });
}

TEST_P(KernelFailures, WithoutReductionTheyWaitForTheStep) {
  if (GetParam() >= 2) GTEST_SKIP() << "gradients are reduced in every backward";
  on_ranks(GetParam(), [](Rank& one) {
    one.engine->backward().begin(false);
    const at::Tensor loss = one.weight.sum();
    orders().fail_copies = one.rank == 0;
    loss.backward();
    one.engine->backward().end();
    orders().fail_copies = false;
    EXPECT_NE(failure_of([&] { one.step(); }), "") << one.rank;
    EXPECT_TRUE(at::equal(one.weight.detach(), at::ones({3000})));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, KernelFailures, testing::Values(0, 1, 2, 3));

TEST(TorchScratch, SaysWhyThereIsNone) {
  TorchScratch scratch(at::kCPU);
  EXPECT_NE(scratch.allocate(64), nullptr);
  EXPECT_EQ(scratch.error(), "");
  EXPECT_EQ(scratch.allocate(size_t{1} << 60), nullptr);
  EXPECT_TRUE(says(scratch.error(), "1152921504606846976 bytes of scratch on cpu: "));
  const at::Tensor reserved = at::empty({128}, at::kByte);
  TorchScratch first(at::kCPU, reserved);
  EXPECT_EQ(first.allocate(128), reserved.data_ptr());
  EXPECT_NE(first.allocate(129), reserved.data_ptr());
}

}  // namespace
}  // namespace ds::zero

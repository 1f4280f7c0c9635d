// The division of gradients, and the effect of a second reduction before the step on the first.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../comm/thread_job.h"
#include "../on_threads.h"
#include "comm/transports/local_communicator.h"
#include "comm/transports/thread_communicator.h"
#include "trained_ranks.h"
#include "zero/engine.h"

namespace ds::zero {
namespace {

// The gradient of one weight after `backwards` reducing backwards, each with the gradient `step + rank + 1`.
at::Tensor reduced(int stage, int backwards, double before, double after, const comm::ProcessMeshPtr& mesh) {
  at::Tensor weight = at::ones({40}).set_requires_grad(true);
  EngineOptions options;
  options.policy = stage_policy(stage);
  options.reducer.predivide = before;
  options.reducer.postscale = after;
  options.gatherer.persistence_numel = 1 << 20;
  auto engine = engine_of({{weight, "weight", 0, 0}}, options, mesh);
  for (int step = 0; step < backwards; ++step) {
    run_backward(*engine, (weight * static_cast<double>(step + mesh->rank({"dp"}) + 1)).sum());
  }
  engine->backward().finish();
  return engine->states().full(StateKind::kGrad, 0, 0);
}

TEST(Reduction, OneRankDividesNothing) {
  for (int stage : {0, 1, 2, 3}) {
    const comm::ProcessMeshPtr alone = mesh_over(comm::local_communicator());
    EXPECT_TRUE(at::equal(reduced(stage, 1, 0.25, 4.0, alone), at::ones({40}))) << "stage " << stage;
    EXPECT_TRUE(at::equal(reduced(stage, 2, 0.25, 4.0, alone), at::ones({40}) * 3)) << "stage " << stage;
  }
}

// Means, and sums as gradient_allreduce_op "sum" wants them.
TEST(Reduction, ASecondOneAddsToTheFirst) {
  constexpr int kWorld = 4;
  for (int stage : {0, 1, 2}) {
    for (const auto& [before, after] : {std::pair(0.25, 1.0), std::pair(0.5, 0.5), std::pair(1.0, 1.0)}) {
      const auto found = train_on<at::Tensor>(kWorld, [&, before = before, after = after](const auto& mesh) {
        return reduced(stage, 2, before, after, mesh);
      });
      const double sum = (1 + 2 + 3 + 4) + (2 + 3 + 4 + 5);
      const at::Tensor expected = at::ones({40}) * (sum * before * after);
      for (const at::Tensor& one : found)
        EXPECT_TRUE(at::allclose(one, expected))
            << "stage " << stage << " before " << before << " after " << after << ": " << one[0].item<float>();
    }
  }
}

// Buckets leave in plan order: one that waits for a gradient that does not come holds up all behind it.
TEST(Reduction, NoBucketWaitsForParametersThatAreLeftOut) {
  constexpr int kWorld = 2;
  for (int stage : {0, 1, 2}) {
    const auto comms = comm::thread_communicators(kWorld);
    on_threads(kWorld, [&](int rank) {
      EngineOptions options;
      options.policy = stage_policy(stage);
      options.reducer.overlap = true;
      options.reducer.bucket_numel = 40;
      options.reducer.predivide = 0.5;
      std::vector<at::Tensor> weights;
      for (int number = 0; number < 6; ++number) weights.push_back(at::ones({40}).set_requires_grad(true));
      auto engine = engine_of(specs_of(weights), options, {comms[rank]});
      const auto overlapped = [&](const std::vector<int>& without) {
        at::Tensor loss = at::zeros({});
        for (int number = 0; number < 6; ++number)
          if (std::find(without.begin(), without.end(), number) == without.end()) loss = loss + weights[number].sum();
        engine->grads().clear();
        run_backward(*engine, loss * (rank + 1));
        return engine->grads().counts().overlapped;
      };
      overlapped({});  // learns
      EXPECT_EQ(overlapped({}), 6);
      EXPECT_LT(overlapped({0, 3, 5}), 6);
      engine->grads().grad_uses().leave_out({0, 3, 5});
      EXPECT_GE(overlapped({0, 3, 5}), 5);  // all up to the last one that has a gradient
      EXPECT_FALSE(engine->grads().used(3));
      EXPECT_TRUE(at::allclose(engine->states().full(StateKind::kGrad, 0, 1), at::ones({40}) * 1.5));
      // One that has a gradient all the same gets it.
      overlapped({0, 5});
      EXPECT_TRUE(at::allclose(engine->states().full(StateKind::kGrad, 0, 3), at::ones({40}) * 1.5));
      engine->grads().grad_uses().leave_out({});
      EXPECT_EQ(overlapped({}), 6);
    });
  }
}

// Experts on the ranks that cut the dense layers: the dense parameters have one rank each, and buckets of experts leave
// while backward runs, behind buckets that are their own sums.
TEST(Reduction, ExpertsHaveMoreRanksThanDenseParameters) {
  constexpr int kWorld = 2;
  for (int stage : {0, 1, 2}) {
    comm::Meeting meeting(/*waits=*/false, true);
    on_threads(kWorld, [&](int rank) {
      const plan::ProcessGrid grid(kWorld, {{"pp", 1, ""}, {"dp", 1, ""}, {"sp", 1, ""}, {"tp", kWorld, ""}});
      const auto mesh = std::make_shared<comm::ProcessMesh>(grid, comm::job_of(rank, kWorld, meeting));
      mesh->fold("experts", {"dp", "tp"}, {{"edp", 0, ""}, {"ep", 1, ""}});
      std::vector<at::Tensor> weights;
      for (int number = 0; number < 4; ++number) weights.push_back(at::ones({40}).set_requires_grad(true));
      std::vector<ParamSpec> specs = specs_of(weights);
      specs[1].rule = specs[2].rule = "experts";
      EngineOptions options;
      options.policy = stage_policy(stage);
      options.reducer.overlap = true;
      options.reducer.bucket_numel = 40;
      auto engine = engine_of(specs, options, mesh);
      for (int step = 0; step < 3; ++step) {  // the first one learns
        engine->grads().clear();
        at::Tensor loss = at::zeros({});
        for (const at::Tensor& weight : weights) loss = loss + weight.sum();
        run_backward(*engine, loss * (rank + 1));
        for (int number = 0; number < 4; ++number) {
          const double expected = number == 0 || number == 3 ? rank + 1 : 3;  // 1 + 2
          EXPECT_TRUE(at::allclose(engine->states().full(StateKind::kGrad, 0, number), at::ones({40}) * expected))
              << "stage " << stage << " step " << step << " weight " << number;
        }
      }
    });
  }
}

// Buckets of many sizes, at most two of which are on their way at one time.
TEST(Reduction, KeepsMemoryForAFewBucketsAndNotForAllSizes) {
  constexpr int kWorld = 2, kWeights = 10;
  const auto comms = comm::thread_communicators(kWorld);
  on_threads(kWorld, [&](int rank) {
    EngineOptions options;
    options.policy = stage_policy(2);
    options.reducer.bucket_numel = 1;  // each weight has its own
    std::vector<at::Tensor> weights;
    for (int number = 0; number < kWeights; ++number)
      weights.push_back(at::ones({1024 * (1 + number * 7 % kWeights)}).set_requires_grad(true));
    const auto engine = engine_of(specs_of(weights), options, {comms[rank]});
    const WireBuffers& memory = engine->grads().memory();
    int64_t kept = 0;
    for (int step = 0; step < 4; ++step) {
      at::Tensor loss = at::zeros({});
      for (const at::Tensor& weight : weights) loss = loss + weight.square().sum();
      run_backward(*engine, loss);
      engine->grads().clear();
      EXPECT_LE(memory.bytes(), 2 * 4 * 1024 * kWeights);
      if (step > 2) {
        EXPECT_EQ(memory.bytes(), kept);
      }
      kept = memory.bytes();
    }
    EXPECT_GT(kept, 0);
  });
}

}  // namespace
}  // namespace ds::zero

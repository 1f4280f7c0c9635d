// A failure of one rank alone is an error of all of them: on files, and in threads beside the training.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include "../error_of.h"
#include "../storage/planes.h"
#include "base/error.h"
#include "comm/transports/thread_communicator.h"
#include "plain_adamw.h"
#include "small_engine.h"
#include "trained_ranks.h"
#include "zero/engine.h"
#include "zero/step/strategies/background.h"

namespace ds::zero {
namespace {

constexpr int kWorld = 3;

EngineOptions options_of(const std::string& strategy, int stage, const std::string& folder) {
  EngineOptions options;
  options.policy = stage_policy(stage);
  options.placements.master = options.placements.slot = at_rest(storage::Medium::kFile, folder);
  if (strategy != "zenflow") options.placements.grad = at_rest(storage::Medium::kFile, folder);
  options.strategy = strategy;
  options.step.zenflow.update_interval = 2;
  options.step.zenflow.overlap = true;
  options.reducer.bucket_numel = 400;
  options.reducer.predivide = 1.0 / kWorld;
  return options;
}

// The errors of all ranks when files of rank 1 fail as `order` says, from the backward of that step on; gradients of
// each step from then on are dropped first where `clears`.
std::vector<std::string> errors_of(const std::string& strategy, int stage, const std::string& order, int from = 0,
                                   bool clears = false) {
  const io::Folder disk;
  const auto comms = comm::thread_communicators(kWorld);
  return on_ranks<std::string>(kWorld, [&](int rank) -> std::string {
    EngineOptions options = options_of(strategy, stage, disk / ("rank" + std::to_string(rank)));
    std::filesystem::create_directory(options.placements.master.folder);
    options.files.files = std::make_shared<io::Files>();
    std::vector<at::Tensor> weights;
    for (int i = 0; i < 5; ++i) weights.push_back(values(i, {60 + i, 6}).set_requires_grad(true));
    auto engine = engine_of(specs_of(weights), options, {comms[rank]});
    use_adam(*engine);
    comms[rank]->barrier();
    try {
      for (int step = 0; step < 5; ++step) {
        if (rank == 1 && step == from) options.files.files->inject(order);
        const StepInputs inputs = adam_inputs(0.0f);
        engine->expect(inputs);
        at::Tensor loss = at::zeros({});
        for (const at::Tensor& weight : weights) loss = loss + weight.square().sum() * (step + rank + 1);
        run_backward(*engine, loss);
        if (clears && step >= from) engine->clear_grads();
        engine->step(inputs);
      }
    } catch (const std::exception& error) {
      return error.what();
    }
    const storage::Usage usage = engine->params().storage()->usage();
    std::string text = "nothing failed; files have " + std::to_string(usage[2].resting) + " bytes, of which " +
                       std::to_string(usage[2].read_bytes) + " were read";
    for (const auto& [name, value] : engine->strategy().figures()) text += ", " + name + " " + std::to_string(value);
    return text;
  });
}

TEST(RankFailures, FilesOfOneRankEndTheStepOnAll) {
  for (const char* strategy : {"plain", "speculative", "zenflow"})
    for (const char* order : {"read:1+:eio", "write:2+:enospc"}) {
      const std::vector<std::string> errors = errors_of(strategy, strategy[0] == 'z' ? 1 : 2, order);
      for (int rank = 0; rank < kWorld; ++rank) {
        EXPECT_TRUE(says(errors[rank], "/rank1/")) << strategy << " " << order << ": " << errors[rank];
        if (rank != 1) {
          EXPECT_TRUE(says(errors[rank], "data-parallel rank 1 could not go on"))
              << strategy << " " << order << ": " << errors[rank];
        }
      }
    }
}

void expect_of_rank_1(const std::vector<std::string>& errors, const std::string& what) {
  for (int rank = 0; rank < kWorld; ++rank) {
    EXPECT_TRUE(says(errors[rank], "/rank1/")) << what << ": " << errors[rank];
    EXPECT_EQ(errors[rank].find("data-parallel rank 1 could not go on") == std::string::npos, rank == 1)
        << what << ": " << errors[rank];
  }
}

// Files of states are made when a strategy is told of the first step: before its backward.
TEST(RankFailures, WhatFailsBeforeTheBackwardIsAnErrorOfAll) {
  expect_of_rank_1(errors_of("speculative", 2, "open:1+:enospc"), "expect");
}

// A strategy that cannot undo on rank 1 what it has made of gradients that are dropped.
class Unforgetting : public StepStrategy {
 public:
  explicit Unforgetting(const StrategyParts& parts) : store_(parts.store) {}
  std::vector<UpdatePart> parts(const StepInputs& inputs) override { return {UpdatePart{}}; }
  void forget() override {
    if (store_.everyone().shard->rank() == 1) throw io::FileError(5, "/rank1/file", "reading /rank1/file failed");
  }

 private:
  const ParamStore& store_;
};
const StrategyRegistration unforgetting("unforgetting",
                                        [](const StrategyParts& parts) -> std::unique_ptr<StepStrategy> {
                                          return std::make_unique<Unforgetting>(parts);
                                        });

TEST(RankFailures, WhatFailsWhileGradientsAreDroppedIsAnErrorOfAll) {
  expect_of_rank_1(errors_of("unforgetting", 2, "", 2, /*clears=*/true), "clear_grads");
}

TEST(RankFailures, ThreadsBesideTheTrainingFailAsThisRankAlone) {
  Background thread;
  thread.run([] { fail(ErrorKind::kValue, "no"); });
  const LoneFailure error = thrown<LoneFailure>([&] { thread.wait(); });
  EXPECT_EQ(error.kind(), ErrorKind::kValue);
  EXPECT_STREQ(error.what(), "a thread that steps beside the training has failed: no");
  thread.run([] { throw std::bad_alloc(); });
  EXPECT_THROW(thread.wait(), LoneFailure);
  thread.run([] { throw io::FileError(5, "path", "of a file"); });
  EXPECT_THROW(thread.wait(), io::FileError);

  const auto comms = comm::thread_communicators(2);
  const auto said = on_ranks<std::string>(2, [&](int rank) {
    return failure_of([&] {
      const MeshSpaces spaces(mesh_over(comms[rank]), stage_policy(0));
      if (rank == 1) {
        const RankFailures failures(
            [&](const std::exception& error) { spaces.abort(lone_text(*spaces.data_parallel(), error)); });
        failures.guard([&] { run_beside([] { throw std::bad_alloc(); }); });
      }
      comms[rank]->barrier();
    });
  });
  EXPECT_TRUE(says(said[0], "rank 1 could not go on: a thread"));
}

}  // namespace
}  // namespace ds::zero

// Slices of parameters that rest on the host or in files (stage 3) change no bit of training; they are where they are
// to be and nowhere else, within the memory that was given them.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <cmath>

#include "../error_of.h"
#include "../io/folder.h"
#include "base/error.h"
#include "io/file_error.h"
#include "trained_ranks.h"
#include "zero/engine.h"

namespace ds::zero {
namespace {

using storage::Medium;

constexpr int kWeights = 5, kSteps = 4;

struct Case {
  int world = 1;
  at::ScalarType type = at::kFloat;
  bool peers = true;  // ranks share memory
  int micro_steps = 1;
  Placements placements{};
  ParamOffload offload{};
  bool trains = true;
  std::shared_ptr<io::Files> files{};
};

struct Result : Trained {
  std::string files;
};

double factor_of(int step) { return step == 2 ? INFINITY : 1.0; }  // gradients of step 2 are not finite

// The last weight is frozen, or all are.
TrainingRank make_rank(const Case& c, const comm::ProcessMeshPtr& mesh) {
  Program program = small_program(kWeights, factor_of, /*alike=*/true);
  program.trained = c.trains ? kWeights - 1 : 0;
  program.each_alone = true;
  EngineOptions options = small_options(3);
  options.placements = c.placements;
  options.param_offload = c.offload;
  options.param_offload.rank = mesh->rank({"dp"});
  options.files.files = c.files;
  return {program, c.type, options, mesh};
}

void make_step(const Case& c, TrainingRank& rank, int step) {
  StepInputs inputs = adam_inputs(0.5f, true);
  inputs.loss_scale = c.type == at::kHalf ? 8.0f : 1.0f;
  const StepReport report = rank.step(step, inputs, c.micro_steps);
  EXPECT_EQ(report.skipped, step == 2);
  if (report.skipped) rank.engine->backward().clear_grads();
}

std::vector<Result> train(const Case& c, const std::string& folder = "") {
  return train_on<Result>(
      c.world,
      [&](const comm::ProcessMeshPtr& mesh) {
        TrainingRank own = make_rank(c, mesh);
        for (int step = 0; step < kSteps; ++step) make_step(c, own, step);
        Result result{own.finish(), ""};
        own.engine->gatherer()->abandon_forward();
        own.engine->params().storage()->settle();
        result.usage = own.engine->params().storage()->usage();
        if (folder.empty()) return result;
        const std::string type = c.type == at::kFloat ? "float32" : c.type == at::kHalf ? "float16" : "bfloat16";
        std::vector<std::string> names;
        for (const auto& entry :
             std::filesystem::directory_iterator(folder + "/" + type + "params/rank" + std::to_string(own.rank)))
          names.push_back(entry.path().filename());
        std::sort(names.begin(), names.end());
        for (const std::string& name : names) result.files += name + " ";
        return result;
      },
      c.peers);
}

storage::Placement at_rest(Medium medium, const std::string& folder = "") {
  storage::Placement placement;
  placement.rest = placement.work = medium;
  placement.folder = folder;
  return placement;
}

// Against the same run with everything on the device.
void compare(Case c, const std::string& folder = "") {
  const std::vector<Result> there = train(c, folder);
  c.placements = {};
  const std::vector<Result> here = train(c);
  for (int rank = 0; rank < c.world; ++rank) {
    const std::string what =
        words("rank", rank, "of", c.world, c.type, c.peers ? "" : "collectives", c.micro_steps, "micro-steps");
    expect_same(there[rank], here[rank], what, 1e-12);
    // A rank that shares its parameters with no other gathers nothing where they rest on the device.
    EXPECT_EQ(here[rank].usage.leases, c.world > 1 ? there[rank].usage.leases : 0) << what;
    EXPECT_EQ(there[rank].usage[1].resting > 0, folder.empty()) << what;
    EXPECT_EQ(there[rank].usage[2].resting > 0, !folder.empty()) << what;
    if (!folder.empty()) {
      EXPECT_EQ(there[rank].files,
                "70_param.tensor.swp 71_param.tensor.swp 72_param.tensor.swp "
                "73_param.tensor.swp 74_param.tensor.swp ")
          << what;
    }
  }
}

TEST(ParamOffload, OnTheHostChangesNoBit) {
  for (int world : {1, 2, 3, 4, 8})
    for (at::ScalarType type : {at::kFloat, at::kBFloat16})
      for (bool peers : {true, false}) {
        Case c{world, type, peers, world == 2 ? 2 : 1};
        c.placements.lp = at_rest(Medium::kHost);
        compare(c);
        if (world > 2) continue;
        c.placements.master = c.placements.slot = c.placements.grad = c.placements.lp;
        compare(c);
      }
}

TEST(ParamOffload, InFilesUnderThePublishedNames) {
  const io::Folder disk;
  for (int world : {1, 2, 4, 8})
    for (at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      const std::string folder = disk / "zero_stage_3";
      Case c{world, type, world != 2, world == 2 ? 2 : 1};
      c.offload.host_numel = 0;
      c.placements.lp = at_rest(Medium::kFile, folder);
      compare(c, folder);
      if (world > 2) continue;
      c.placements.slot = c.placements.grad = at_rest(Medium::kFile, disk.path());
      compare(c, folder);
    }
  EXPECT_EQ(disk.entries(), 0u);
}

TEST(ParamOffload, Fp16WithItsLossScale) {
  const io::Folder disk;
  for (int world : {1, 2}) {
    Case c{world, at::kHalf, world == 2, 2};
    c.placements.lp = at_rest(Medium::kHost);
    compare(c);
    const std::string folder = disk / "zero_stage_3";
    c.offload.host_numel = 0;
    c.placements.lp = at_rest(Medium::kFile, folder);
    c.placements.master = c.placements.slot = at_rest(Medium::kFile, disk.path());
    compare(c, folder);
  }
}

// Nobody trains: what an evaluation needs is gathered from where it rests, the second time ahead.
TEST(ParamOffload, InferenceWithoutAnOptimizer) {
  const io::Folder disk;
  for (int world : {1, 2}) {
    Case c{world, at::kBFloat16};
    c.trains = false;
    c.offload.host_numel = 0;
    c.placements.lp = at_rest(Medium::kFile, disk / "zero_stage_3");
    train_on<int>(world, [&](const comm::ProcessMeshPtr& mesh) {
      TrainingRank own = make_rank(c, mesh);
      EXPECT_EQ(own.engine->params().storage()->usage()[0].resting, 0);
      for (int round = 0; round < 3; ++round) {
        own.gather();
        for (int i = 0; i < kWeights; ++i)
          EXPECT_TRUE(at::equal(own.weights[i], values(i, {4 + i, 3}).to(c.type))) << i;
        own.engine->gatherer()->end_forward({});
      }
      EXPECT_GT(own.engine->params().storage()->usage().prefetch_hits, 0);
      return 0;
    });
  }
}

// The first parameters rest on the host, as many as were allowed.
TEST(ParamOffload, ElementsOnTheHostAreACeiling) {
  const io::Folder disk;
  for (int64_t allowed : {0, 1, 50, 100, 1000}) {
    Case c{2, at::kBFloat16};
    c.offload.host_numel = allowed;
    c.placements.lp = at_rest(Medium::kFile, disk / "zero_stage_3");
    const std::vector<Result> there = train(c);
    c.placements = {};
    const std::vector<Result> here = train(c);
    for (int rank = 0; rank < 2; ++rank) {
      expect_same(here[rank].params, there[rank].params, "parameter");
      const int64_t on_host = there[rank].usage[1].resting / 2;
      EXPECT_LE(on_host, allowed);
      if (allowed >= 50) {
        EXPECT_GT(on_host, 0);
      }
      EXPECT_EQ(there[rank].usage[2].resting == 0, allowed >= 100);
    }
  }
}

TEST(ParamOffload, BuffersAreACeilingAndNoneMayBeSmallerThanAParameter) {
  const io::Folder disk;
  Case c{1, at::kBFloat16};
  c.offload = {0, 3, 48, 0};
  c.placements.lp = at_rest(Medium::kFile, disk / "zero_stage_3");
  const std::vector<Result> there = train(c);
  EXPECT_LE(there[0].usage[1].peak, 3 * 2 * 4096);  // and nothing else is on the host
  EXPECT_EQ(there[0].usage[1].over_budget, 0);
  c.offload.buffer_numel = 31;
  const std::string complaint = error_of([&] { make_rank(c, mesh_over(comm::local_communicator())); });
  EXPECT_TRUE(says(complaint, "buffer_size is 31 elements"));
  EXPECT_TRUE(says(complaint, "needs 32: set it to at least 32"));
  EXPECT_EQ(disk.entries(), 0u);
}

// Parameters outlive their engine where they are; the memory of masters and states goes with it.
TEST(ParamOffload, ParametersOutliveTheirEngineInTheirFiles) {
  const io::Folder disk;
  Case c{1, at::kBFloat16};
  c.offload.host_numel = 0;
  c.placements.lp = at_rest(Medium::kFile, disk / "zero_stage_3");
  TrainingRank own = make_rank(c, mesh_over(comm::local_communicator()));
  const auto params = own.engine->params().sharded_params();
  const std::shared_ptr<storage::ShardStorage> storage = own.engine->params().storage();
  own.engine->release();
  own.engine.reset();
  EXPECT_EQ(storage->usage()[0].resting, 0);
  EXPECT_GT(storage->usage()[2].resting, 0);
  const at::Tensor slice = params[0]->slice(storage::Access::kRead).data().clone();
  EXPECT_TRUE(at::equal(slice, values(0, {4, 3}).to(c.type).flatten()));
}

// A read or a write that fails on one rank is an error of all ranks, soon, and leaves nothing behind.
TEST(ParamOffload, AFaultOfOneRankIsAnErrorOfAll) {
  const io::Folder disk;
  for (const std::string order : {"read:1+:eio", "write:1+:enospc", "read:4+:eio", "write:3+:eio", "gone", "cut"}) {
    Case c{3, at::kBFloat16};
    c.offload.host_numel = 0;
    c.placements.lp = at_rest(Medium::kFile, disk / "zero_stage_3");
    const auto begin = std::chrono::steady_clock::now();
    const auto errors = train_on<std::string>(c.world, [&](const comm::ProcessMeshPtr& mesh) {
      Case own_case = c;
      own_case.files = std::make_shared<io::Files>();
      TrainingRank own = make_rank(own_case, mesh);
      own.engine->params().storage()->settle();
      own.engine->params().everyone().shard->barrier();
      if (own.rank == 1 && order.find(':') != std::string::npos) own_case.files->inject(order);
      for (const auto& entry : std::filesystem::directory_iterator(disk / "zero_stage_3/bfloat16params/rank1")) {
        if (own.rank == 1 && order == "gone") std::filesystem::remove(entry.path());
        if (own.rank == 1 && order == "cut") std::filesystem::resize_file(entry.path(), 3);
      }
      return failure_of([&] {
        for (int step = 0; step < 2; ++step) make_step(c, own, step);
      });
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    EXPECT_LT(took.count(), 5.0);
    for (int rank = 0; rank < c.world; ++rank) {
      EXPECT_TRUE(says(errors[rank], "bfloat16params/rank1/")) << order << ": " << errors[rank];
      if (rank != 1) {
        EXPECT_TRUE(says(errors[rank], "data-parallel rank 1 could not go on")) << order;
      }
    }
    EXPECT_EQ(disk.entries(), 0u);
  }
}

}  // namespace
}  // namespace ds::zero

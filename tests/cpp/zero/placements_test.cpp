// Where masters, gradients and optimizer states rest changes no bit of training: on the host, in files, a share of
// each. On the CPU the tiers of the device and of the host are different buffers with budgets of their own, so whatever
// looks for a buffer in the wrong tier fails here, too.
#include "zero/offload/placements.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "../every_case.h"
#include "../storage/planes.h"
#include "base/error.h"
#include "trained_ranks.h"
#include "zero/engine.h"

namespace ds::zero {
namespace {

using storage::Medium;

constexpr int kWeights = 5, kSteps = 5, kMicroSteps = 2;

struct Case {
  std::string name;
  int stage, world;
  at::ScalarType type;
  std::string rule = "adam";
  c10::optional<at::ScalarType> grad_dtype{};
  int64_t bucket = 20;
};

double factor_of(int step) { return step == 3 ? INFINITY : 1.0; }  // gradients of step 3 are not finite

std::vector<Trained> train(const Case& c, const Placements& placements, const storage::Budget& budget = {}) {
  EngineOptions options = small_options(c.stage);
  options.placements = placements;
  options.budget = budget;
  options.grad_dtype = c.grad_dtype;
  options.reducer.bucket_numel = c.bucket;
  return train_on(c.world, [&](const comm::ProcessMeshPtr& mesh) {
    TrainingRank rank(small_program(kWeights, factor_of), c.type, options, mesh, c.rule);
    for (int step = 0; step < kSteps; ++step) {
      const StepReport report = rank.step(step, rank.inputs(0.5f, true, 0.05), kMicroSteps);
      EXPECT_EQ(report.skipped, step == 3) << c.name;
      if (report.skipped) rank.engine->backward().clear_grads();
    }
    return rank.finish();
  });
}

void compare(const Case& c, const Placements& placements, bool norms_too = true) {
  const std::vector<Trained> here = train(c, {}), there = train(c, placements);
  for (int rank = 0; rank < c.world; ++rank) {
    const std::string what = words(c.name, "stage", c.stage, "rank", rank, "of", c.world, c.rule, c.type);
    expect_same(there[rank], here[rank], what, norms_too ? 0.0 : 1e-12);
    EXPECT_EQ(here[rank].usage[1].resting + here[rank].usage[2].resting, 0);
    EXPECT_GT(there[rank].usage[1].resting + there[rank].usage[2].resting, 0) << what;
    EXPECT_EQ(there[rank].usage.leases, c.stage == 3 && c.world > 1 ? kWeights : 0) << what;  // what is gathered
  }
}

const storage::Placement kHost = at_rest(Medium::kHost);

TEST(Placements, OnTheHostChangeNoBit) {
  NewPairs sample;
  for (int stage : {0, 1, 2, 3}) {
    for (int world : {1, 2, 4}) {
      for (at::ScalarType type : {at::kFloat, at::kBFloat16}) {
        if (!sample({stage, world, static_cast<int>(type)})) continue;
        compare({"masters and states", stage, world, type}, {kHost, {}, kHost});
        if (stage >= 1) compare({"gradients, too", stage, world, type}, {kHost, kHost, kHost});
      }
    }
  }
  for (int stage : {1, 2, 3}) {
    compare({"fp16", stage, 2, at::kHalf}, {kHost, kHost, kHost});
    // A rank may own nothing of what is used of a bucket.
    for (int64_t bucket : {30, 45, 60})
      compare({"a part of a bucket", stage, 2, at::kBFloat16, "adam", {}, bucket}, {kHost, {}, kHost});
    compare({"many ranks", stage, 3, at::kBFloat16}, {kHost, kHost, kHost});
    compare({"many ranks", stage, 8, at::kBFloat16}, {kHost, kHost, kHost});
  }
  compare({"states alone", 2, 2, at::kBFloat16}, {{}, {}, kHost});
  compare({"masters alone", 3, 2, at::kFloat}, {kHost, {}, {}});
  compare({"gradients alone", 2, 2, at::kBFloat16}, {{}, kHost, {}});
  compare({"fp32 gradients", 2, 2, at::kBFloat16, "adam", at::kFloat}, {kHost, kHost, kHost});
  compare({"one bucket", 3, 2, at::kBFloat16, "adam", at::kFloat, 1000000}, {kHost, kHost, kHost});
}

TEST(Placements, RulesThatNeedMoreThanALoop) {
  for (const char* rule : {"lamb", "muon", "sgd"})
    for (int stage : {1, 2, 3}) compare({"rule", stage, 2, at::kBFloat16, rule}, {kHost, kHost, kHost});
}

TEST(Placements, InFilesAndByShares) {
  const io::Folder folder;
  const storage::Placement file = at_rest(Medium::kFile, folder.path());
  for (int stage : {1, 2, 3}) {
    for (int world : {1, 2}) {
      compare({"files", stage, world, at::kBFloat16}, {file, {}, file});
      compare({"files and host", stage, world, at::kFloat}, {file, kHost, kHost});
      for (double share : {0.3, 0.7}) {
        const storage::Placement part = at_rest(Medium::kHost, "", share);
        compare({"a share", stage, world, at::kBFloat16}, {part, {}, part});
        compare({"a share of all", stage, world, at::kFloat}, {part, part, part}, false);
      }
    }
    // Sums of squares are added up bucket by bucket there.
    compare({"all in files", stage, 2, at::kFloat, "lamb"}, {file, file, file}, false);
  }
  EXPECT_EQ(folder.entries(), 0u);
}

// Transfers take the memory of some buckets, not of the model, and the budget holds.
TEST(Placements, ABudgetOfAFewBuckets) {
  const io::Folder folder;
  const storage::Placement file = at_rest(Medium::kFile, folder.path());
  const Case c{"budget", 2, 1, at::kBFloat16, "adam", {}, 1};  // a bucket for each weight
  storage::Budget budget;
  budget.bytes[Medium::kHost] = 5 * 8192;  // master, gradient, two states, parameters: a block and its alignment each
  const Trained plain = train(c, {})[0], tight = train(c, {file, file, file}, budget)[0];
  expect_same(plain.params, tight.params, "parameter");
  expect_same(plain.slots, tight.slots, "slot");
  EXPECT_LE(tight.usage[1].peak, budget.bytes[Medium::kHost]);
  EXPECT_EQ(tight.usage[1].over_budget, 0);
  EXPECT_EQ(tight.usage[1].resting, 0);
  EXPECT_LT(tight.usage[0].resting, plain.usage[0].resting);
}

// Reads and writes between steps find buffers where they are.
TEST(Placements, StatesAreReadAndWrittenWhereTheyRest) {
  const io::Folder folder;
  for (const auto& placement : {at_rest(Medium::kDevice), kHost, at_rest(Medium::kFile, folder.path())}) {
    at::Tensor weight = at::arange(6, at::kFloat).to(at::kBFloat16).set_requires_grad(true);
    EngineOptions options;
    options.policy = stage_policy(2);
    options.placements = {placement, placement, placement};
    const auto made = engine_of({{weight, "w", 0, 0}}, options);
    Engine& engine = *made;
    use_adam(engine);
    EXPECT_TRUE(at::equal(engine.states().full(StateKind::kMaster, 0, 0), at::arange(6, at::kFloat)));
    const at::Tensor mine = at::arange(6, at::kFloat) / 3;
    engine.states().set_full(StateKind::kSlot, 1, 0, mine);
    EXPECT_TRUE(at::equal(engine.states().full(StateKind::kSlot, 1, 0), mine));
    engine.states().set_full(StateKind::kMaster, 0, 0, mine);
    EXPECT_TRUE(at::equal(engine.states().full(StateKind::kMaster, 0, 0), mine));
    EXPECT_TRUE(at::equal(weight.detach(), mine.to(at::kBFloat16)));
    weight.detach().fill_(2);
    engine.states().refresh_master();
    EXPECT_TRUE(at::equal(engine.states().full(StateKind::kMaster, 0, 0), at::full({6}, 2.0f)));
    engine.states().set_full(StateKind::kGrad, 0, 0, mine);
    EXPECT_TRUE(at::equal(engine.states().full(StateKind::kGrad, 0, 0), mine.to(at::kBFloat16).to(at::kFloat)));
    // A piece, for as long as somebody holds it; what has no address shows its shape alone.
    const at::Tensor shown = engine.states().pieces(StateKind::kMaster, 0).at(0);
    EXPECT_EQ(shown.numel(), 6);
    EXPECT_EQ(shown.is_meta(), placement.rest == Medium::kFile);
    engine.states().piece(StateKind::kSlot, 0, 0, storage::Access::kWrite).second.fill_(3);
    EXPECT_TRUE(at::equal(engine.states().full(StateKind::kSlot, 0, 0), at::full({6}, 3.0f)));
    EXPECT_TRUE(at::equal(engine.states().pieces(StateKind::kSlot, 0, true).at(0).reshape({6}), at::full({6}, 3.0f)));
    // The step waits for a background copy of states.
    engine.states().hold().hold();
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      engine.states().hold().let_go();
    });
    engine.step(adam_inputs());
    later.join();
    EXPECT_FALSE(at::equal(engine.states().full(StateKind::kSlot, 1, 0), mine));
  }
}

}  // namespace
}  // namespace ds::zero

#include "zero/stage_policy.h"

#include <gtest/gtest.h>

#include "../error_of.h"
#include "base/error.h"

namespace ds::zero {
namespace {

// Rajbhandari et al., "ZeRO" (SC 2020), section 4: states, then gradients, then parameters are partitioned.
TEST(StagePolicy, EachStageShardsOneThingMore) {
  for (int stage = 0; stage <= 3; ++stage) {
    const StagePolicy& policy = stage_policy(stage);
    EXPECT_EQ(policy.stage, stage);
    EXPECT_EQ(policy.shards_states() + policy.shards_grads() + policy.shards_params(), stage);
    EXPECT_TRUE(policy.shards_states() || !policy.shards_grads());
    EXPECT_TRUE(policy.shards_grads() || !policy.shards_params());
  }
}

TEST(StagePolicy, WhatFollowsFromTheCuts) {
  for (int stage = 0; stage <= 3; ++stage) {
    const StagePolicy& policy = stage_policy(stage);
    EXPECT_EQ(policy.reduce == ReduceAt::kMicroStep, policy.shards_grads());  // whole sums have no memory to wait in
    EXPECT_EQ(policy.layout == Layout::kPerParam, policy.shards_params());
    EXPECT_EQ(policy.gather == GatherAt::kOnUse, policy.shards_params());
    EXPECT_EQ(policy.gather == GatherAt::kNever, !policy.shards_states());
    EXPECT_EQ(policy.grads_on_params, !policy.shards_states());
    EXPECT_EQ(policy.saved.optimizer_by_rank, policy.shards_states());
    EXPECT_EQ(policy.saved.model_by_rank, policy.shards_params());
  }
}

TEST(StagePolicy, OtherStagesDoNotExist) {
  for (int stage : {-1, 4}) {
    EXPECT_TRUE(says(error_of([&] { stage_policy(stage); }), "zero_optimization.stage " + std::to_string(stage)));
  }
}

}  // namespace
}  // namespace ds::zero

#include "plan/memory_plan.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace ds::plan {
namespace {

const StateWidths kMixed{2, 2, 4, 8};  // 16-bit training with Adam
const Sharded kStages[] = {{false, false, false}, {false, false, true}, {false, true, true}, {true, true, true}};

TEST(MemoryPlan, WhatAStageShardsIsDividedByTheRanks) {
  const int64_t numel = 1000;
  EXPECT_EQ(states_per_rank(kStages[0], numel, 4, kMixed).total(), 16 * numel);
  EXPECT_EQ(states_per_rank(kStages[1], numel, 4, kMixed).total(), 4 * numel + 12 * numel / 4);
  EXPECT_EQ(states_per_rank(kStages[2], numel, 4, kMixed).total(), 2 * numel + 14 * numel / 4);
  EXPECT_EQ(states_per_rank(kStages[3], numel, 4, kMixed).total(), 16 * numel / 4);
  for (const Sharded& stage : kStages) EXPECT_EQ(states_per_rank(stage, numel, 1, kMixed).total(), 16 * numel);
  const StateBytes full = states_per_rank(kStages[0], 10, 2, {4, 4, 0, 8});
  EXPECT_EQ(full.master, 0);
  EXPECT_EQ(full.total(), 160);
}

TEST(MemoryPlan, BucketsThatMoveAreASixteenthAndNotTooSmall) {
  EXPECT_EQ(moved_bucket_limit(0), 1 << 20);
  EXPECT_EQ(moved_bucket_limit(16 << 20), 1 << 20);
  EXPECT_EQ(moved_bucket_limit(1600 << 20), 100 << 20);
}

TEST(MemoryPlan, SharesAreRoundedUpToWholeElements) {
  const StateBytes bytes = states_per_rank(kStages[3], 10, 4, kMixed);  // 3 elements each
  EXPECT_EQ(bytes.param, 6);
  EXPECT_EQ(bytes.grad, 6);
  EXPECT_EQ(bytes.master, 12);
  EXPECT_EQ(bytes.slots, 24);
  EXPECT_EQ(states_per_rank(kStages[3], 0, 4, kMixed).total(), 0);
}

TEST(MemoryPlan, Zero2) {
  const int64_t numel = 1600;
  MemoryNeed need = zero2_need(numel, {8, 1}, false);
  EXPECT_EQ(need.device_bytes, 4 * numel + 16 * numel / 8);
  EXPECT_EQ(need.host_bytes, 4 * 8 * numel);
  need = zero2_need(numel, {8, 2}, false);
  EXPECT_EQ(need.device_bytes, 4 * numel + numel);
  EXPECT_EQ(need.host_bytes, 4 * 8 * numel);
  need = zero2_need(numel, {8, 1}, true);
  EXPECT_EQ(need.device_bytes, 2 * numel);
  EXPECT_EQ(need.host_bytes, 32 * numel);
  EXPECT_EQ(zero2_need(numel, {1, 1}, true).host_bytes, 16 * numel);  // at least what the step needs
  EXPECT_EQ(zero2_need(numel, {4, 4}, true).host_bytes, 64 * numel);
}

TEST(MemoryPlan, Zero3) {
  const int64_t numel = 1440, layer = 100;
  const Node node{4, 2};
  MemoryNeed need = zero3_need(numel, layer, node, {true, true, true});
  EXPECT_EQ(need.device_bytes, 4 * layer);
  EXPECT_EQ(need.host_bytes, 18 * numel / 2);
  need = zero3_need(numel, layer, node, {true, true, false});
  EXPECT_EQ(need.host_bytes, 16 * numel);  // four fp32 models beat 9 bytes per parameter
  EXPECT_EQ(zero3_need(numel, layer, {1, 1}, {true, true, false}).host_bytes, 18 * numel);
  need = zero3_need(numel, layer, node, {true, false, true});
  EXPECT_EQ(need.device_bytes, 4 * layer + 2 * numel / 8);
  EXPECT_EQ(need.host_bytes, 8 * numel);
  need = zero3_need(numel, layer, node, {false, false, true});
  EXPECT_EQ(need.device_bytes, 4 * layer + 18 * numel / 8);
  EXPECT_EQ(need.host_bytes, layer * 16);
  EXPECT_EQ(zero3_need(numel, layer, node, {false, false, false}).host_bytes, numel * 16);
}

TEST(MemoryPlan, RefusesWhatCannotBe) {
  EXPECT_THROW(states_per_rank(kStages[1], -1, 1, kMixed), Error);
  EXPECT_THROW(states_per_rank(kStages[1], 1, 0, kMixed), Error);
  EXPECT_THROW(states_per_rank(kStages[1], 1, 1, {2, -2, 4, 8}), Error);
  EXPECT_THROW(zero2_need(1, {0, 1}, true), Error);
  EXPECT_THROW(zero2_need(1, {1, 0}, true), Error);
  EXPECT_THROW(zero2_need(-1, {1, 1}, true), Error);
  EXPECT_THROW(zero3_need(1, -1, {1, 1}, {true, true, true}), Error);
  EXPECT_THROW(zero3_need(1, 1, {1, 1}, {false, true, true}), Error);
  const int64_t huge = int64_t{1} << 61;
  EXPECT_THROW(states_per_rank(kStages[0], huge, 1, kMixed), Error);
  EXPECT_THROW(states_per_rank(kStages[0], huge / 2, 1, {2, 2, 4, 4}), Error);  // each fits, the sum does not
  EXPECT_THROW(zero2_need(huge, {1, 1}, false), Error);
  EXPECT_THROW(zero3_need(huge, 1, {1, 1}, {true, true, true}), Error);
}

}  // namespace
}  // namespace ds::plan

#include "plan/memory_plan.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace ds::plan {
namespace {

TEST(MemoryPlan, BucketsThatMoveAreASixteenthAndNotTooSmall) {
  EXPECT_EQ(moved_bucket_limit(0), 1 << 20);
  EXPECT_EQ(moved_bucket_limit(16 << 20), 1 << 20);
  EXPECT_EQ(moved_bucket_limit(1600 << 20), 100 << 20);
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
  EXPECT_THROW(zero2_need(1, {0, 1}, true), Error);
  EXPECT_THROW(zero2_need(1, {1, 0}, true), Error);
  EXPECT_THROW(zero2_need(-1, {1, 1}, true), Error);
  EXPECT_THROW(zero3_need(1, -1, {1, 1}, {true, true, true}), Error);
  EXPECT_THROW(zero3_need(1, 1, {1, 1}, {false, true, true}), Error);
  const int64_t huge = int64_t{1} << 61;
  EXPECT_THROW(zero2_need(huge, {1, 1}, false), Error);
  EXPECT_THROW(zero3_need(huge, 1, {1, 1}, {true, true, true}), Error);
}

}  // namespace
}  // namespace ds::plan

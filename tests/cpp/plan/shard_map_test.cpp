#include "plan/shard_map.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "plan/bucket_plan.h"

namespace ds::plan {
namespace {

TEST(FlatLayout, AlignsEveryStartAndTheTotal) {
  const FlatLayout layout = flat_layout({3, 0, 8, 5}, 4, 3);
  EXPECT_EQ(layout.offsets, (std::vector<int64_t>{0, 4, 4, 12}));
  EXPECT_EQ(layout.total_numel % (4 * 3), 0);
  EXPECT_GE(layout.total_numel, 17);
}

TEST(FlatLayout, RefusesNonsense) {
  EXPECT_THROW(flat_layout({1}, 0, 1), Error);
  EXPECT_THROW(flat_layout({1}, 1, 0), Error);
  EXPECT_THROW(flat_layout({-1}, 1, 1), Error);
}

// Every element of every parameter belongs to exactly one extent, and extents lie where the flat space says.
TEST(ShardMap, CoversEachElementOnce) {
  const std::vector<int64_t> numels{3, 0, 8, 5, 1, 31, 2};
  for (int64_t align : {1, 4, 16}) {
    for (int64_t parts = 1; parts <= 5; ++parts) {
      const FlatLayout layout = flat_layout(numels, align, parts);
      const ShardMap map = slice_flat(layout, parts);
      EXPECT_EQ(map.shard_numel * parts, layout.total_numel);
      std::vector<std::vector<int>> seen;
      for (int64_t numel : numels) seen.emplace_back(numel, 0);
      for (const Extent& extent : map.extents) {
        ASSERT_GT(extent.numel, 0);
        ASSERT_LE(extent.shard_offset + extent.numel, map.shard_numel);
        EXPECT_EQ(extent.rank * map.shard_numel + extent.shard_offset,
                  layout.offsets[extent.param] + extent.param_offset);
        for (int64_t i = 0; i < extent.numel; ++i) ++seen[extent.param][extent.param_offset + i];
      }
      for (const auto& param : seen)
        for (int count : param) EXPECT_EQ(count, 1);
    }
  }
}

TEST(ShardMap, OneOwnerWhenNotSharded) {
  const ShardMap map = slice_flat(flat_layout({5, 7}, 8, 1), 1);
  ASSERT_EQ(map.extents.size(), 2u);
  for (const Extent& extent : map.extents) EXPECT_EQ(extent.rank, 0);
}

TEST(BucketPlan, PartitionsTheSpaceFromItsEnd) {
  const FlatLayout layout = flat_layout({10, 20, 30, 40}, 2, 1);
  for (int64_t cap : {1, 30, 45, 70, 1000}) {
    const auto buckets = bucket_plan(layout, cap);
    int64_t end = layout.total_numel;
    int32_t next = 3;
    for (const Bucket& bucket : buckets) {
      EXPECT_EQ(bucket.end, end);
      EXPECT_EQ(bucket.last_param, next);
      EXPECT_LE(bucket.first_param, bucket.last_param);
      EXPECT_TRUE(bucket.end - bucket.begin <= cap || bucket.first_param == bucket.last_param);
      end = bucket.begin;
      next = bucket.first_param - 1;
    }
    EXPECT_EQ(end, 0);
    EXPECT_EQ(next, -1);
  }
}

TEST(BucketPlan, RefusesASizeThatHoldsNothing) { EXPECT_THROW(bucket_plan(flat_layout({4}, 1, 1), 0), Error); }

TEST(BucketPlan, NothingToReduce) { EXPECT_TRUE(bucket_plan(flat_layout({}, 4, 2), 10).empty()); }

}  // namespace
}  // namespace ds::plan

#include "plan/shard_map.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace ds::plan {
namespace {

using Maker = ShardMap (*)(const std::vector<int64_t>&, int64_t, int64_t, int64_t);

// Every element of every parameter belongs to exactly one extent, extents do not overlap in any rank's shard or in the
// full space, and both positions of an extent agree with its bucket.
void check(Maker make) {
  const std::vector<int64_t> numels{3, 0, 8, 5, 1, 31, 2, 64};
  for (int64_t align : {1, 4, 16}) {
    for (int64_t parts = 1; parts <= 5; ++parts) {
      for (int64_t cap : {1, 20, 50, 1000}) {
        const ShardMap map = make(numels, align, parts, cap);
        std::vector<std::vector<int>> seen;
        for (int64_t numel : numels) seen.emplace_back(numel, 0);
        std::vector<int> full(map.full_numel(), 0);
        std::vector<std::vector<int>> shards(parts, std::vector<int>(map.shard_numel, 0));
        for (size_t e = 0; e < map.extents.size(); ++e) {
          const Extent& extent = map.extents[e];
          ASSERT_GT(extent.numel, 0);
          ASSERT_LT(extent.rank, parts);
          ASSERT_GE(e, map.first[extent.param]);
          ASSERT_LT(e, map.first[extent.param + 1]);
          const Bucket& bucket = map.buckets[map.bucket_of[extent.param]];
          ASSERT_GE(extent.shard_offset, bucket.shard_begin);
          ASSERT_LE(extent.shard_offset + extent.numel, bucket.shard_end);
          EXPECT_EQ(extent.full_offset, map.full_offset(bucket, extent.rank, extent.shard_offset));
          if (map.offsets[extent.param] >= 0) {
            EXPECT_EQ(extent.full_offset, map.offsets[extent.param] + extent.param_offset);
          }
          for (int64_t i = 0; i < extent.numel; ++i) {
            ++seen[extent.param][extent.param_offset + i];
            ++full[extent.full_offset + i];
            ++shards[extent.rank][extent.shard_offset + i];
          }
        }
        for (const auto& param : seen)
          for (int count : param) ASSERT_EQ(count, 1);
        for (int count : full) ASSERT_LE(count, 1);
        for (const auto& shard : shards)
          for (int count : shard) ASSERT_LE(count, 1);
      }
    }
  }
}

ShardMap flat(const std::vector<int64_t>& numels, int64_t align, int64_t parts, int64_t max_numel) {
  return flat_shards(numels, align, parts, max_numel);
}

TEST(FlatShards, CoverEachElementOnce) { check(flat); }

TEST(FlatShards, GiveAParameterABucketOfItsOwn) {
  const ShardMap map = flat_shards({8, 8, 8, 8, 0}, 8, 1, 1000, {false, true, false, false, true});
  std::vector<std::pair<int32_t, int32_t>> found;
  for (const Bucket& bucket : map.buckets) found.emplace_back(bucket.first_param, bucket.last_param);
  EXPECT_EQ(found, (std::vector<std::pair<int32_t, int32_t>>{{4, 4}, {2, 3}, {1, 1}, {0, 0}}));
}
TEST(ParamShards, CoverEachElementOnce) { check(param_shards); }

TEST(FlatShards, AlignEveryStart) {
  const ShardMap map = flat_shards({3, 0, 8, 5}, 4, 3, 1000);
  EXPECT_EQ(map.offsets, (std::vector<int64_t>{0, 4, 4, 12}));
  EXPECT_EQ(map.shard_numel % 4, 0);
  EXPECT_GE(map.full_numel(), 17);
}

TEST(FlatShards, OneOwnerWhenNotSharded) {
  const ShardMap map = flat_shards({5, 7}, 8, 1, 1000);
  ASSERT_EQ(map.extents.size(), 2u);
  for (const Extent& extent : map.extents) {
    EXPECT_EQ(extent.rank, 0);
    EXPECT_EQ(extent.shard_offset, extent.full_offset);
  }
}

TEST(ParamShards, SliceEachParameterEqually) {
  const ShardMap map = param_shards({10, 3}, 1, 4, 1000);
  ASSERT_EQ(map.extents.size(), 4u + 3u);
  EXPECT_EQ(map.extents[0].numel, 3);
  EXPECT_EQ(map.extents[3].numel, 1);  // 10 = 3 + 3 + 3 + 1
  EXPECT_EQ(map.extents[0].shard_offset, map.extents[3].shard_offset);
}

TEST(Buckets, AreFormedFromTheEndAndBounded) {
  const std::vector<int64_t> numels{10, 20, 30, 40};
  for (Maker make : {flat, static_cast<Maker>(param_shards)}) {
    for (int64_t cap : {1, 30, 45, 70, 1000}) {
      const ShardMap map = make(numels, 2, 1, cap);
      int32_t next = 3;
      int64_t end = map.shard_numel;
      for (const Bucket& bucket : map.buckets) {
        EXPECT_EQ(bucket.last_param, next);
        EXPECT_EQ(bucket.shard_end, end);
        EXPECT_TRUE(bucket.first_param == bucket.last_param || bucket.shard_end - bucket.shard_begin <= cap);
        next = bucket.first_param - 1;
        end = bucket.shard_begin;
      }
      EXPECT_EQ(next, -1);
      EXPECT_EQ(end, 0);
    }
  }
}

TEST(ShardMap, RefusesNonsense) {
  EXPECT_THROW(flat_shards({1}, 0, 1, 1), Error);
  EXPECT_THROW(flat_shards({1}, 1, 0, 1), Error);
  EXPECT_THROW(flat_shards({-1}, 1, 1, 1), Error);
  EXPECT_THROW(param_shards({4}, 1, 1, 0), Error);
  EXPECT_TRUE(flat_shards({}, 4, 2, 10).buckets.empty());
}

}  // namespace
}  // namespace ds::plan

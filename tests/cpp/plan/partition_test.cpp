#include "plan/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "base/error.h"

namespace ds::plan {
namespace {

using Offsets = std::vector<int64_t>;

TEST(Partition, UniformSpreadsTheRemainderOverTheFirstParts) {
  EXPECT_EQ(partition_uniform(10, 4), (Offsets{0, 3, 6, 8, 10}));
  EXPECT_EQ(partition_uniform(8, 4), (Offsets{0, 2, 4, 6, 8}));
  EXPECT_EQ(partition_uniform(2, 4), (Offsets{0, 1, 2, 2, 2}));
  EXPECT_EQ(partition_uniform(0, 2), (Offsets{0, 0, 0}));
  EXPECT_THROW(partition_uniform(3, 0), Error);
  EXPECT_THROW(partition_uniform(-1, 2), Error);
}

double heaviest(const std::vector<double>& weights, const Offsets& offsets) {
  double most = 0;
  for (size_t p = 0; p + 1 < offsets.size(); ++p) {
    double sum = 0;
    for (int64_t i = offsets[p]; i < offsets[p + 1]; ++i) sum += weights[i];
    most = std::max(most, sum);
  }
  return most;
}

// Tries every way to cut.
double best_heaviest(const std::vector<double>& weights, int64_t parts) {
  const auto n = static_cast<int64_t>(weights.size());
  double best = std::numeric_limits<double>::infinity();
  Offsets offsets{0};
  std::function<void()> extend = [&] {
    const auto left = parts - static_cast<int64_t>(offsets.size());
    if (left == 0) {
      offsets.push_back(n);
      best = std::min(best, heaviest(weights, offsets));
      offsets.pop_back();
      return;
    }
    for (int64_t cut = offsets.back() + 1; cut <= n - left; ++cut) {
      offsets.push_back(cut);
      extend();
      offsets.pop_back();
    }
  };
  extend();
  return best;
}

TEST(Partition, BalancedIsOptimal) {
  uint32_t seed = 1;
  for (int round = 0; round < 60; ++round) {
    std::vector<double> weights(3 + round % 8);
    for (double& weight : weights) {
      seed = seed * 1664525u + 1013904223u;
      weight = static_cast<double>(seed >> 28);  // 0..15
    }
    for (int64_t parts = 1; parts < static_cast<int64_t>(weights.size()); ++parts) {
      const Offsets offsets = partition_balanced(weights, parts);
      ASSERT_EQ(offsets.size(), static_cast<size_t>(parts + 1));
      EXPECT_EQ(offsets.front(), 0);
      EXPECT_EQ(offsets.back(), static_cast<int64_t>(weights.size()));
      for (int64_t p = 0; p < parts; ++p) EXPECT_LT(offsets[p], offsets[p + 1]);
      EXPECT_EQ(heaviest(weights, offsets), best_heaviest(weights, parts));
    }
  }
}

TEST(Partition, BalancedEvensOutWhatTheHeaviestPartLeaves) {
  EXPECT_EQ(partition_balanced({1, 1, 1, 1, 1, 1, 1, 1}, 4), (Offsets{0, 2, 4, 6, 8}));
  EXPECT_EQ(partition_balanced({0, 1.1, 1.9, 30}, 2), (Offsets{0, 3, 4}));
  EXPECT_EQ(partition_balanced({0, 1.1, 30, 3}, 3), (Offsets{0, 2, 3, 4}));
  EXPECT_EQ(partition_balanced({9, 1, 1, 1, 1}, 3), (Offsets{0, 1, 3, 5}));
  EXPECT_EQ(partition_balanced({5, 6}, 4), (Offsets{0, 1, 2, 2, 2}));
  EXPECT_EQ(partition_balanced({}, 2), (Offsets{0, 0, 0}));
}

TEST(Partition, WrongWeightsAreRefused) {
  EXPECT_THROW(partition_balanced({1, -1, 2}, 2), Error);
  EXPECT_THROW(partition_balanced({1, std::numeric_limits<double>::quiet_NaN(), 2}, 2), Error);
  EXPECT_THROW(partition_balanced({1, 2}, 0), Error);
}

}  // namespace
}  // namespace ds::plan

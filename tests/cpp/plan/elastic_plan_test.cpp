#include "plan/elastic_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "../error_of.h"
#include "base/error.h"

namespace ds::plan {
namespace {

using Numbers = std::vector<int64_t>;

TEST(ElasticPlan, HighlyCompositeNumbers) {
  int64_t most = 0, last = 0;
  for (int64_t number = 1; number <= 3000; ++number) {
    int64_t divisors = 0;
    for (int64_t d = 1; d <= number; ++d) divisors += number % d == 0;
    if (divisors > most) {
      most = divisors;
      last = number;
    }
    EXPECT_EQ(highly_composite(number), last) << number;
  }
  EXPECT_EQ(highly_composite(0), 0);
  EXPECT_EQ(highly_composite(720720), 720720);
  EXPECT_EQ(highly_composite(1000000), 720720);
  EXPECT_EQ(highly_composite(1081080), 1081080);
}

TEST(ElasticPlan, ThePublishedExample) {
  const ElasticPlan plan = elastic_plan({10000, {8, 12, 16, 17}, 32, 1500, true});
  EXPECT_EQ(plan.batch, 9792);
  EXPECT_EQ(plan.worlds.size(), 23u);
  EXPECT_TRUE(std::count(plan.worlds.begin(), plan.worlds.end(), 64));
  EXPECT_EQ(elastic_micro(plan.batch, 64, {8, 12, 16, 17}, true), 17);
}

// The rule as plain loops.
ElasticPlan by_loops(const ElasticRequest& r) {
  Numbers bases = r.micros;
  bases.push_back(std::accumulate(r.micros.begin(), r.micros.end(), int64_t{1},
                                  [](int64_t a, int64_t b) { return std::lcm(a, b); }));
  ElasticPlan best{0, {}};
  for (const int64_t base : bases) {
    if (base > r.max_batch) continue;
    const int64_t batch = base * highly_composite(r.max_batch / base);
    Numbers worlds;
    for (int64_t world = r.min_ranks; world <= r.max_ranks && world <= batch; ++world) {
      const bool fits = std::any_of(r.micros.begin(), r.micros.end(),
                                    [&](int64_t micro) { return batch % micro == 0 && batch / micro % world == 0; });
      if (fits) worlds.push_back(world);
    }
    const bool better = r.prefer_larger ? batch > best.batch : batch < best.batch;
    if (worlds.size() > best.worlds.size() || (!worlds.empty() && worlds.size() == best.worlds.size() && better))
      best = {batch, worlds};
  }
  return best;
}

TEST(ElasticPlan, RandomRequestsAgainstPlainLoops) {
  std::mt19937 random(20);
  const auto from = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 500; ++round) {
    ElasticRequest r{from(32, 4000), {}, from(1, 20), 0, from(0, 1) == 1};
    r.max_ranks = r.min_ranks + from(0, 600);
    for (int64_t i = from(1, 4); i > 0; --i) r.micros.push_back(from(1, 20));
    const ElasticPlan got = elastic_plan(r), want = by_loops(r);
    ASSERT_EQ(got.batch, want.batch) << round;
    ASSERT_EQ(got.worlds, want.worlds) << round;
  }
}

// Every choice of up to three micro sizes up to 7, every limit up to 24, two ranges of ranks, both preferences.
TEST(ElasticPlan, EverySmallRequestAgainstPlainLoops) {
  int compared = 0;
  for (unsigned chosen = 1; chosen < 128; ++chosen) {
    if (__builtin_popcount(chosen) > 3) continue;
    Numbers micros;
    for (int64_t micro = 1; micro <= 7; ++micro) {
      if (chosen >> (micro - 1) & 1u) micros.push_back(micro);
    }
    for (int64_t most = micros.back(); most <= 24; ++most) {
      for (const int64_t low : {1, 3}) {
        for (const bool larger : {false, true}) {
          const ElasticRequest r{most, micros, low, 12, larger};
          const ElasticPlan got = elastic_plan(r), want = by_loops(r);
          ASSERT_EQ(got.batch, want.batch) << most << " " << chosen << " " << low << " " << larger;
          ASSERT_EQ(got.worlds, want.worlds) << most << " " << chosen << " " << low << " " << larger;
          ASSERT_LE(got.batch, most);
          for (const int64_t world : got.worlds) ASSERT_GT(elastic_micro(got.batch, world, micros, larger), 0);
          for (const int64_t nodes : {1, 2, 3}) {
            if (micros.back() > most / 2) continue;
            ASSERT_LE(elastic_node_plan(r, {4, 2}, 4 * nodes).batch, most);
          }
          ++compared;
        }
      }
    }
  }
  EXPECT_GT(compared, 4000);
}

TEST(ElasticPlan, WholeNodesAndModelParallelRanks) {
  const ElasticRequest r{2000, {2, 4, 6}, 8, 64, true};
  EXPECT_EQ(elastic_nodes(r, {8, 4}).worlds, (std::vector<int64_t>{2, 4, 6, 8, 10, 12, 16}));
  for (int64_t nodes = 1; nodes <= 8; ++nodes) {
    const ElasticNodePlan plan = elastic_node_plan(r, {8, 4}, nodes * 8);
    ASSERT_GT(plan.batch, 0);
    EXPECT_LE(plan.batch, 2000);
    EXPECT_EQ(plan.batch % (plan.micro * nodes * 2), 0);
    EXPECT_EQ(plan.listed, nodes != 7) << nodes;  // seven divides no batch that others share
  }
  const std::string why = error_of(ErrorKind::kValue, [&] { elastic_node_plan(r, {8, 3}, 16); });
  EXPECT_TRUE(says(why, "divisible by model_parallel_size"));
  EXPECT_TRUE(says(error_of(ErrorKind::kValue, [&] { elastic_node_plan(r, {8, 1}, 12); }), "8 and 16"));
}

TEST(ElasticPlan, WhatDoesNotFit) {
  EXPECT_TRUE(says(error_of(ErrorKind::kValue,
                            [] {
                              elastic_plan({10, {2, 11}, 1, 4, true});
                            }),
                   "11 is larger than 10"));
  EXPECT_EQ(elastic_plan({8, {8}, 2, 4, true}).batch, 0);
  EXPECT_EQ(elastic_micro(9, 2, {1, 3}, true), 0);
  const Numbers primes{1000003, 1000033, 1000037, 1000039};  // their common multiple is beyond any integer
  EXPECT_GT(elastic_plan({2000000, primes, 1, 100, true}).batch, 0);
  EXPECT_EQ(elastic_plan({32, {1, 2, 3, 7}, 1, 100, true}).batch, 24);  // the common multiple, 42, is above the limit
  EXPECT_EQ(elastic_plan({100, {8, 10, 12}, 1, 100, true}).batch, 96);  // it is 120
}

}  // namespace
}  // namespace ds::plan

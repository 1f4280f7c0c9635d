// Plans of routes against plain loops over the tokens, on sizes that divide nothing.
#include "plan/route_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <random>

#include "../error_of.h"
#include "base/error.h"

namespace ds::plan {
namespace {

std::vector<int32_t> random_choices(unsigned seed, int64_t tokens, const RouteRules& rules) {
  std::mt19937 random(seed);
  std::vector<int32_t> all;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> experts(rules.experts);
    for (int64_t e = 0; e < rules.experts; ++e) experts[e] = static_cast<int32_t>(e);
    std::shuffle(experts.begin(), experts.end(), random);
    const bool unused = random() % 7 == 0;
    for (int64_t j = 0; j < rules.k; ++j) all.push_back(unused ? kUnrouted : experts[j]);
  }
  return all;
}

// Assignments that `expert` keeps, in the order of their slots.
std::vector<int32_t> kept_by(int32_t expert, const std::vector<int32_t>& choices, const RouteRules& rules,
                             const std::vector<float>& priority) {
  std::vector<int32_t> all;
  const auto tokens = static_cast<int32_t>(choices.size() / rules.k), k = static_cast<int32_t>(rules.k);
  if (rules.choices_first) {
    for (int32_t j = 0; j < k; ++j)
      for (int32_t t = 0; t < tokens; ++t) all.push_back(t * k + j);
  } else {
    for (int32_t a = 0; a < tokens * k; ++a) all.push_back(a);
  }
  all.erase(std::remove_if(all.begin(), all.end(), [&](int32_t a) { return choices[a] != expert; }), all.end());
  if (rules.capacity < 0 || static_cast<int64_t>(all.size()) <= rules.capacity) return all;
  std::vector<int32_t> best = all;
  if (!priority.empty())
    std::stable_sort(best.begin(), best.end(), [&](int32_t a, int32_t b) { return priority[a] > priority[b]; });
  best.resize(rules.capacity);
  std::vector<int32_t> kept;
  for (int32_t a : all)
    if (std::find(best.begin(), best.end(), a) != best.end()) kept.push_back(a);
  return kept;
}

TEST(RoutePlanTest, EqualsPlainLoops) {
  for (int64_t tokens : {0, 1, 5, 33}) {
    for (int64_t experts : {1, 3, 8}) {
      for (int64_t k = 1; k <= std::min<int64_t>(experts, 3); ++k) {
        for (int64_t capacity : {-1, 0, 1, 4, 100}) {
          for (int form = 0; form < 4; ++form) {
            const RouteRules rules = {experts, k, capacity, form % 2 == 1};
            const std::vector<int32_t> choices = random_choices(17 * form + tokens, tokens, rules);
            std::vector<float> priority;
            for (size_t a = 0; form >= 2 && a < choices.size(); ++a) priority.push_back(a * 7919 % 5 * 0.25f);  // ties
            const RoutePlan plan =
                plan_routes(choices.data(), choices.size(), rules, priority.empty() ? nullptr : priority.data());
            for (int64_t padded : {int64_t{-1}, std::max<int64_t>(capacity, tokens)}) {
              const std::vector<int32_t> slots = plan.slots(choices.data(), padded);
              const std::vector<int32_t> sources = plan.sources(choices.data(), padded);
              int64_t start = 0, rows = 0;
              for (int64_t e = 0; e < experts; ++e) {
                const std::vector<int32_t> want = kept_by(static_cast<int32_t>(e), choices, rules, priority);
                EXPECT_EQ(plan.wanted[e], std::count(choices.begin(), choices.end(), e));
                ASSERT_EQ(plan.kept[e], static_cast<int64_t>(want.size()));
                for (size_t i = 0; i < want.size(); ++i) {
                  EXPECT_EQ(sources[start + i], want[i]);
                  EXPECT_EQ(slots[want[i]], start + static_cast<int64_t>(i));
                }
                rows += static_cast<int64_t>(want.size());
                start += padded < 0 ? plan.kept[e] : padded;
              }
              EXPECT_EQ(static_cast<int64_t>(sources.size()), start);
              EXPECT_EQ(std::count_if(sources.begin(), sources.end(), [](int32_t a) { return a >= 0; }), rows);
              EXPECT_EQ(std::count_if(slots.begin(), slots.end(), [](int32_t s) { return s >= 0; }), rows);
            }
          }
        }
      }
    }
  }
}

std::string refusal(const std::vector<int32_t>& choices, const RouteRules& rules) {
  return failure_of<Error>([&] { plan_routes(choices.data(), choices.size(), rules, nullptr); });
}

TEST(RoutePlanTest, NamesTheTokenThatCannotBeRouted) {
  EXPECT_EQ(refusal({0, 1, kNotANumber, kNotANumber}, {2, 2}), "the logits of token 1 are not numbers (nan)");
  EXPECT_EQ(refusal({0, 1, 0, 2}, {2, 2}), "token 1 chose expert 2; there are 2");
  EXPECT_TRUE(says(refusal({0, 1, 0}, {2, 2}), "k choices of each token"));
}

TEST(RoutePlanTest, ArrivalsAreSortedByExpertAndInThemByRank) {
  const ArrivalPlan plan = plan_arrivals({2, 0, 1, 0, 3, 1}, 2, 3);
  EXPECT_EQ(plan.from_rank, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(plan.of_expert, (std::vector<int64_t>{2, 3, 2}));
  EXPECT_EQ(plan.order, (std::vector<int32_t>{0, 1, 3, 4, 5, 2, 6}));
  EXPECT_THROW(plan_arrivals({1}, 2, 1), Error);
  EXPECT_THROW(plan_arrivals({1, -1}, 2, 1), Error);
}

// The number that a row carries, so that it is known where it came from.
struct Row {
  int64_t rank, assignment;
  bool operator==(const Row& other) const { return rank == other.rank && assignment == other.assignment; }
};

TEST(RoutePlanTest, RowsOfAllRanksMeetTheirExpertsAndComeHome) {
  for (int64_t ranks = 1; ranks <= 8; ++ranks) {
    for (int64_t local : {1, 3}) {
      const RouteRules rules = {ranks * local, std::min<int64_t>(2, ranks * local)};
      std::vector<std::vector<int32_t>> choices;
      std::vector<RoutePlan> plans;
      std::vector<std::vector<Row>> leaving(ranks), arrived(ranks);
      for (int64_t r = 0; r < ranks; ++r) {  // a different number of tokens on each; rank 3 has none
        choices.push_back(random_choices(static_cast<unsigned>(r), r == 3 ? 0 : 5 + 4 * r, rules));
        plans.push_back(plan_routes(choices[r].data(), choices[r].size(), rules, nullptr));
        for (int32_t a : plans[r].sources(choices[r].data(), -1)) leaving[r].push_back({r, a});
      }
      std::vector<ArrivalPlan> arrivals;
      for (int64_t to = 0; to < ranks; ++to) {
        std::vector<int64_t> counts;
        for (int64_t from = 0; from < ranks; ++from) {
          const std::vector<int64_t>& kept = plans[from].kept;
          counts.insert(counts.end(), kept.begin() + to * local, kept.begin() + (to + 1) * local);
          int64_t first = 0, rows = 0;
          for (int64_t e = 0; e < (to + 1) * local; ++e) (e < to * local ? first : rows) += kept[e];
          for (int64_t i = first; i < first + rows; ++i) arrived[to].push_back(leaving[from][i]);
        }
        arrivals.push_back(plan_arrivals(counts, ranks, local));
        ASSERT_EQ(arrivals[to].order.size(), arrived[to].size());
        size_t row = 0;
        for (int64_t e = 0; e < local; ++e)
          for (int64_t i = 0; i < arrivals[to].of_expert[e]; ++i, ++row) {
            const Row& one = arrived[to][arrivals[to].order[row]];
            EXPECT_EQ(choices[one.rank][one.assignment], to * local + e);
          }
      }
      for (int64_t from = 0; from < ranks; ++from) {
        std::vector<Row> back;  // of each rank what came from this one, in the order in which it came
        for (int64_t to = 0; to < ranks; ++to)
          std::copy_if(arrived[to].begin(), arrived[to].end(), std::back_inserter(back),
                       [&](const Row& one) { return one.rank == from; });
        EXPECT_EQ(back, leaving[from]) << ranks << " ranks";
      }
    }
  }
}

}  // namespace
}  // namespace ds::plan

#include "plan/learned_order.h"

#include <gtest/gtest.h>

#include <random>

namespace ds::plan {
namespace {

using Numbers = LearnedOrder::Numbers;

// The forward of `count` modules and the backward, in which those that `again` says come once more.
std::vector<Numbers> program(int32_t count, const std::vector<bool>& again, const Numbers& left_out) {
  std::vector<Numbers> entries;
  for (int32_t number = 0; number < count; ++number) entries.push_back({number});
  for (int32_t number = count - 1; number >= 0; --number)
    if (again[number]) entries.push_back({number});
  std::vector<Numbers> result;
  for (const Numbers& entry : entries)
    if (without(entry, left_out) == entry) result.push_back(entry);
  return result;
}

TEST(LearnedOrder, AnyRunsOfAProgramGiveItsOrder) {
  std::mt19937 random(3);
  for (int which = 0; which < 2000; ++which) {
    const int32_t count = 1 + static_cast<int32_t>(random() % 12);
    std::vector<bool> again;
    for (int32_t number = 0; number < count; ++number) again.push_back(which % 2 || random() % 2);
    std::optional<LearnedOrder> order;
    for (int run = 0; run < 12; ++run) {
      Numbers left_out;
      for (int32_t number = 0; number < count; ++number)
        if (random() % 2) left_out.push_back(number);
      const LearnedOrder now{program(count, again, left_out), left_out};
      order = order ? merged(*order, now) : now;
      ASSERT_TRUE(order) << "case " << which << ", run " << run;
      ASSERT_EQ(order->entries, program(count, again, order->unseen)) << "case " << which << ", run " << run;
    }
  }
}

TEST(LearnedOrder, WhatContradicts) {
  const LearnedOrder order{{{0}, {1}, {2}}, {5}};
  EXPECT_TRUE(merged(order, {{{0}, {1}, {2}}, {}}));
  EXPECT_TRUE(merged(order, {{{0}, {5}, {2}}, {1}}));
  EXPECT_FALSE(merged(order, {{{0}, {2}}, {}})) << "1 is missing";
  EXPECT_FALSE(merged(order, {{{0}, {2}, {1}}, {}})) << "another order";
  EXPECT_FALSE(merged(order, {{{0}, {1}, {2}, {3}}, {}})) << "3 is new, and no run has left it out";
  EXPECT_FALSE(merged(order, {{}, {}}));
  const auto shrunk = merged(order, {{{0}, {5}, {2}}, {}}, /*shrinks=*/true);
  ASSERT_TRUE(shrunk);
  EXPECT_EQ(shrunk->entries, (std::vector<Numbers>{{0}, {5}, {2}}));
  EXPECT_FALSE(merged(order, {{{0}, {2}, {1}}, {}}, /*shrinks=*/true)) << "another order";
}

TEST(LearnedOrder, PartsOfAnEntry) {
  const auto found = merged({{{0}, {1, 2}}, {3}}, {{{0}, {1, 3}}, {2}});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->entries, (std::vector<Numbers>{{0}, {1, 2, 3}}));
  EXPECT_TRUE(found->unseen.empty());
}

}  // namespace
}  // namespace ds::plan

#include "zero/step/matrix_step.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace ds::zero {
namespace {

TEST(SpreadCostsTest, TheLoadsAreEven) {
  const std::vector<int64_t> costs = {7, 1, 5, 3, 0, 5, 3, 2};
  const std::vector<int> owners = spread_costs(costs, 3);
  std::vector<int64_t> loads(3);
  for (size_t i = 0; i < costs.size(); ++i) loads[owners[i]] += costs[i];
  EXPECT_EQ(*std::max_element(loads.begin(), loads.end()), 9);  // of 26
  EXPECT_EQ(owners[0], 0);                                      // the most expensive one comes first
}

TEST(SpreadCostsTest, OneRankNoneAndHugeCosts) {
  EXPECT_EQ(spread_costs({3, 1, 2}, 1), (std::vector<int>{0, 0, 0}));
  EXPECT_TRUE(spread_costs({}, 4).empty());
  const int64_t huge = int64_t{4} << 60;
  EXPECT_EQ(spread_costs({huge, huge, huge, huge}, 2), (std::vector<int>{0, 1, 0, 1}));
}

}  // namespace
}  // namespace ds::zero

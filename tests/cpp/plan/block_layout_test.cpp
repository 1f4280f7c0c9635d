#include "plan/block_layout.h"

#include <gtest/gtest.h>

#include "../error_of.h"

namespace ds::plan {
namespace {

using Numbers = std::vector<int32_t>;

TEST(BlockLayout, ListsTheKeysOfQueriesAndTheQueriesOfKeys) {
  const std::vector<uint8_t> seen = {1, 0, 1,  //
                                     0, 0, 0,  // sees nothing
                                     0, 7, 0,  // the second head
                                     1, 1, 1};
  const BlockLayout layout(seen.data(), 2, 2, 3);
  EXPECT_EQ(layout.heads(), 2);
  EXPECT_EQ(layout.pairs(), 6);
  EXPECT_EQ(layout.keys().start, (Numbers{0, 2, 2, 2, 3, 6}));
  EXPECT_EQ(layout.keys().list, (Numbers{0, 2, 1, 0, 1, 2}));
  EXPECT_EQ(layout.readers().start, (Numbers{0, 1, 1, 2, 2, 3, 5, 6}));
  EXPECT_EQ(layout.readers().list, (Numbers{0, 0, 1, 0, 1, 1}));
}

TEST(BlockLayout, HeadsThatAreAlikeAreOne) {
  const std::vector<uint8_t> seen = {1, 0, 1, 1, 9, 0, 2, 1};
  const BlockLayout layout(seen.data(), 2, 2, 2);
  EXPECT_EQ(layout.heads(), 1);
  EXPECT_EQ(layout.keys().start, (Numbers{0, 1, 3}));
  EXPECT_EQ(layout.readers().list, (Numbers{0, 1, 1}));
}

TEST(BlockLayout, RefusesALayoutOfNothing) {
  EXPECT_TRUE(says(error_of([] { BlockLayout(nullptr, 1, 0, 3); }), "got [1, 0, 3]"));
}

}  // namespace
}  // namespace ds::plan

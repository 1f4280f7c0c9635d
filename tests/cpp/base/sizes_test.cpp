// Products of sizes: what an integer cannot hold is an error, never a smaller number.
#include "base/sizes.h"

#include <gtest/gtest.h>

#include <limits>

#include "../error_of.h"

namespace ds::sizes {
namespace {

TEST(Sizes, ProductsAndSumsThatFitAreThose) {
  EXPECT_EQ(product<int64_t>("bytes", 3, 4, 5), 60);
  EXPECT_EQ(sum<size_t>("bytes", 3, 4), 7u);
  EXPECT_EQ(rounded_up<size_t>("bytes", 4097, 4096), 8192u);
  EXPECT_EQ(rounded_up<size_t>("bytes", 4096, 4096), 4096u);
}

TEST(Sizes, OthersAreRefused) {
  constexpr size_t kMost = std::numeric_limits<size_t>::max();
  EXPECT_EQ(error_of(ErrorKind::kValue, [] { product<size_t>("bytes of x", (size_t{1} << 62) + 16, 4); }),
            "bytes of x: 4611686018427387920 x 4 is more than an integer here can hold");
  EXPECT_TRUE(says(error_of(ErrorKind::kValue, [] { product<int>("n", 1 << 20, 1, 1 << 20); }), "n: "));
  EXPECT_TRUE(says(error_of(ErrorKind::kValue, [] { sum<size_t>("n", kMost, 1); }), "n: "));
  EXPECT_TRUE(says(error_of(ErrorKind::kValue, [] { rounded_up<size_t>("n", kMost, 4096); }), "n: "));
}

}  // namespace
}  // namespace ds::sizes

#include "kernels/random_choice.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace ds::kernels {
namespace {

std::vector<int32_t> chosen(const ChoicePlace& at, uint32_t count, uint32_t keep) {
  std::vector<int32_t> out(keep);
  choose_items(at, count, keep, out.data());
  return out;
}

TEST(RandomChoice, ChoosesAscendingNumbersOfEachCount) {
  for (uint32_t count = 0; count < 40; ++count) {
    for (uint32_t keep = 0; keep <= count; ++keep) {
      const auto found = chosen({count, ChoiceFor::kTokens, 1, 2, keep}, count, keep);
      EXPECT_EQ(std::set<int32_t>(found.begin(), found.end()).size(), keep);
      EXPECT_TRUE(std::is_sorted(found.begin(), found.end()));
      if (keep > 0) {
        EXPECT_GE(found.front(), 0);
        EXPECT_LT(found.back(), static_cast<int32_t>(count));
      }
    }
  }
}

TEST(RandomChoice, EverySetIsEquallyLikely) {
  constexpr int kDraws = 60000;
  std::vector<int> times(64);  // by the bits of the set
  for (int draw = 0; draw < kDraws; ++draw) {
    size_t bits = 0;
    for (int32_t item : chosen({9, ChoiceFor::kTokens, static_cast<uint32_t>(draw), 0, 0}, 6, 3)) bits |= 1u << item;
    ++times[bits];
  }
  for (size_t bits = 0; bits < times.size(); ++bits) {
    if (__builtin_popcountll(bits) != 3) continue;
    EXPECT_NEAR(times[bits], kDraws / 20, 250) << bits;  // 20 sets, 4.7 standard errors
  }
}

TEST(RandomChoice, EachNumberOfThePlaceCounts) {
  const ChoicePlace at{3, ChoiceFor::kTokens, 5, 7, 9};
  const auto first = chosen(at, 100, 50);
  EXPECT_EQ(chosen(at, 100, 50), first);
  for (const ChoicePlace& other : {ChoicePlace{4, ChoiceFor::kTokens, 5, 7, 9},
                                   {3, ChoiceFor::kLayers, 5, 7, 9},
                                   {3, ChoiceFor::kTokens, 6, 7, 9},
                                   {3, ChoiceFor::kTokens, 5, 8, 9},
                                   {3, ChoiceFor::kTokens, 5, 7, 10}})
    EXPECT_NE(chosen(other, 100, 50), first);
  EXPECT_NE(choice_number(at), choice_number({3, ChoiceFor::kLayers, 5, 7, 9}));
}

}  // namespace
}  // namespace ds::kernels

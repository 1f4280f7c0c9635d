#include "plan/sequence_cut.h"

#include <gtest/gtest.h>

#include "../error_of.h"

namespace ds::plan {
namespace {

TEST(SequenceCut, SaysWhatAReaderHasOfAHolder) {
  // Two tensors over three ranks: five heads, and one that the first two ranks read.
  const SequenceCut cut({4, 0, 3}, {{{0, 2}, {2, 4}, {4, 5}}, {{0, 1}, {0, 1}, {0, 0}}});
  EXPECT_EQ(cut.length(), 7);
  EXPECT_EQ(cut.all_heads(0), 5);
  EXPECT_FALSE(cut.copied(0));
  EXPECT_TRUE(cut.copied(1));
  EXPECT_EQ(cut.stacked_heads(1), 2);
  const auto same = [](const SequenceBox& box, std::vector<int64_t> numbers) {
    return std::vector<int64_t>{box.token, box.tokens, box.head, box.heads} == numbers;
  };
  EXPECT_TRUE(same(cut.in_part(0, 2, 1), {0, 3, 2, 2}));
  EXPECT_TRUE(same(cut.in_whole(0, 2, 1), {4, 3, 0, 2}));
  EXPECT_TRUE(same(cut.in_stack(1, 0, 1), {0, 4, 1, 1}));
  EXPECT_TRUE(same(cut.in_part(1, 0, 2), {0, 4, 0, 0}));
}

TEST(SequenceCut, RefusesWhatDoesNotFitTogether) {
  const auto refused = [](std::vector<int64_t> tokens, std::vector<HeadRun> runs) {
    return error_of([&] { SequenceCut(tokens, {runs}); });
  };
  EXPECT_TRUE(says(refused({1, 1}, {{0, 2}}), "runs of heads for 1 ranks, parts of the sequence for 2"));
  EXPECT_TRUE(says(refused({1, 1}, {{0, 1}, {2, 3}}), "head 1 of 3 is on no rank"));
  EXPECT_TRUE(says(refused({1, -1}, {{0, 1}, {1, 1}}), "-1 tokens"));
  EXPECT_TRUE(says(refused({1, 1}, {{0, 1}, {1, 0}}), "a run of heads from 1 to 0"));
}

}  // namespace
}  // namespace ds::plan

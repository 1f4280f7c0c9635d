#include "plan/batch_plan.h"

#include <gtest/gtest.h>

#include "../error_of.h"
#include "base/error.h"

namespace ds::plan {
namespace {

using Size = std::optional<int64_t>;
const Size kNone;

void expect_plan(Size train, Size micro, Size accumulation, int64_t world, BatchPlan want) {
  const BatchPlan got = plan_batch({train, micro, accumulation, world, "test"});
  EXPECT_EQ(got.train, want.train);
  EXPECT_EQ(got.micro, want.micro);
  EXPECT_EQ(got.accumulation, want.accumulation);
}

std::string refusal(Size train, Size micro, Size accumulation, int64_t world) {
  return error_of(ErrorKind::kAssertion, [&] { plan_batch({train, micro, accumulation, world, "test"}); });
}

TEST(BatchPlan, DerivesWhatIsMissing) {
  expect_plan(16, 2, 4, 2, {16, 2, 4});          // all three: kept
  expect_plan(16, 2, kNone, 2, {16, 2, 4});      // accumulation = train / micro / world
  expect_plan(16, kNone, 4, 2, {16, 2, 4});      // micro = train / world / accumulation
  expect_plan(kNone, 2, 4, 2, {16, 2, 4});       // train = micro * accumulation * world
  expect_plan(16, kNone, kNone, 2, {16, 8, 1});  // only train
  expect_plan(kNone, 2, kNone, 2, {4, 2, 1});    // only micro
}

TEST(BatchPlan, EveryPlanMultipliesOutOrIsRefused) {
  for (int64_t train = 0; train <= 24; ++train) {
    for (int64_t micro = 0; micro <= 6; ++micro) {
      for (int64_t accumulation = 0; accumulation <= 6; ++accumulation) {
        for (int64_t world = 1; world <= 5; ++world) {
          const auto given = [](int64_t v) { return v ? Size(v) : kNone; };
          const int64_t unit = (micro ? micro : 1) * (accumulation ? accumulation : 1) * world;
          const bool possible = train || micro;
          const bool fits = !train ? true : micro && accumulation ? train == unit : train % unit == 0;
          try {
            const BatchPlan plan = plan_batch({given(train), given(micro), given(accumulation), world, ""});
            EXPECT_TRUE(possible && fits) << train << " " << micro << " " << accumulation << " " << world;
            EXPECT_EQ(plan.train, plan.micro * plan.accumulation * world);
            EXPECT_TRUE(plan.micro > 0 && plan.accumulation > 0);
            EXPECT_TRUE((!train || plan.train == train) && (!micro || plan.micro == micro));
            EXPECT_TRUE(!accumulation || plan.accumulation == accumulation);
          } catch (const Error&) {
            EXPECT_FALSE(possible && fits) << train << " " << micro << " " << accumulation << " " << world;
          }
        }
      }
    }
  }
}

TEST(BatchPlan, MessagesShowTheNumbersTheSourceAndTheNearestChoices) {
  const std::string triple = refusal(8, 2, 2, 4);
  EXPECT_TRUE(says(triple, "8 is not 2 x 2 x 4 = 16"));
  EXPECT_TRUE(says(triple, "train_batch_size 8, train_micro_batch_size_per_gpu 2, gradient_accumulation_steps 2"));
  EXPECT_TRUE(says(triple, "4 data-parallel ranks (test)"));
  EXPECT_TRUE(says(triple, "Choose train_batch_size 16, or train_micro_batch_size_per_gpu 1, or gradient_accumulation_steps 1."));
  EXPECT_TRUE(says(refusal(8, kNone, kNone, 3), "Choose train_batch_size 6 or 9."));
  EXPECT_TRUE(says(refusal(2, kNone, kNone, 3), "Choose train_batch_size 3."));
  EXPECT_TRUE(says(refusal(10, 3, kNone, 1), "Choose train_batch_size 9 or 12, or train_micro_batch_size_per_gpu 2 or 5."));
  EXPECT_TRUE(says(refusal(12, kNone, 5, 2), "gradient_accumulation_steps 3 or 6"));
}

TEST(BatchPlan, RefusesWhatCannotBe) {
  EXPECT_TRUE(says(refusal(kNone, kNone, kNone, 1), "neither"));
  EXPECT_TRUE(says(refusal(kNone, kNone, 4, 1), "neither"));
  EXPECT_TRUE(says(refusal(0, kNone, kNone, 1), "train_batch_size must be greater than 0"));
  EXPECT_TRUE(says(refusal(8, -1, kNone, 1), "train_micro_batch_size_per_gpu must be greater than 0"));
  EXPECT_TRUE(says(refusal(8, kNone, kNone, 0), "at least one data-parallel rank"));
  const int64_t huge = int64_t{1} << 62;
  EXPECT_TRUE(says(refusal(kNone, huge, 4, 1), "larger than any integer"));
  EXPECT_TRUE(says(refusal(huge, huge, huge, 8), "larger than any integer"));
  EXPECT_TRUE(says(refusal(huge - 1, 7, kNone, 1), "Choose"));
}

}  // namespace
}  // namespace ds::plan

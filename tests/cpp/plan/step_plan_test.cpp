// Times of a step: one stream that computes, one for the calls of each group.
#include "plan/step_plan.h"

#include <gtest/gtest.h>

namespace ds::plan {
namespace {

TEST(StepPlan, CallsOverlapWithWhatIsComputedUntilSomebodyWaits) {
  StepPlan step;
  step.set_phase("forward");
  step.compute(100);
  const int64_t first = step.start("dp", 50), second = step.start("dp", 50), other = step.start("tp", 20);
  step.set_phase("backward");
  step.compute(30);
  step.wait(other);
  EXPECT_EQ(step.now(), 130);
  step.wait(first);
  EXPECT_EQ(step.now(), 150);
  step.wait(second);  // behind the first one
  EXPECT_EQ(step.now(), 200);
  EXPECT_EQ(step.waited(), 70);
  EXPECT_EQ(step.communicated(), 120);
  EXPECT_EQ(step.phases(), (std::map<std::string, int64_t>{{"backward", 30}, {"forward", 100}}));
  step.wait(second);
  EXPECT_EQ(step.now(), 200);
}

TEST(StepPlan, ANewStepForgetsCallsOfTheOneBefore) {
  StepPlan step;
  const int64_t call = step.start("dp", 50);
  step.reset();
  step.wait(call);
  EXPECT_EQ(step.now(), 0);
}

TEST(LinkCost, HasRoundsAndBytes) {
  const LinkCost link{1000, 1'000'000'000};
  EXPECT_EQ(link.time_of(5000, 1), 0);
  EXPECT_EQ(link.time_of(5000, 2), 1000 + 5000);
  EXPECT_EQ(link.time_of(5000, 5), 3000 + 5000);
  EXPECT_EQ(LinkCost().time_of(5000, 2), 0);
}

}  // namespace
}  // namespace ds::plan

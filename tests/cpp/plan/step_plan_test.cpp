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

TEST(StepPlan, OperationsBeginWhenTheHostHasStartedThem) {
  StepPlan step;
  step.set_phase("forward");
  step.host(10);
  step.compute(100);
  step.host(10);  // while the device computes
  step.compute(5);
  EXPECT_EQ(step.now(), 115);
  step.set_phase("step");
  step.host(200);
  EXPECT_EQ(step.now(), 115);
  EXPECT_EQ(step.start("dp", 50), 0);
  step.compute(1);
  EXPECT_EQ(step.now(), 221);
  step.wait(0);
  EXPECT_EQ(step.now(), 270);
  step.host(10);  // which the host does not know yet
  step.synchronize();
  step.host(7);
  step.synchronize();
  EXPECT_EQ(step.now(), 277);
  EXPECT_EQ(step.phases(), (std::map<std::string, int64_t>{{"forward", 115}, {"step", 106 + 7}}));
}

TEST(StepPlan, AHostThatWaitsForEachOperationAddsItsTime) {
  StepPlan step(true);
  step.set_phase("forward");
  step.host(10);
  EXPECT_EQ(step.now(), 10);
  step.compute(100);
  step.host(10);
  step.compute(5);
  EXPECT_EQ(step.now(), 125);
  step.wait(step.start("dp", 50));
  step.host(3);
  EXPECT_EQ(step.now(), 178);
  EXPECT_EQ(step.phases(), (std::map<std::string, int64_t>{{"forward", 128}}));
  step.reset();
  step.compute(1);
  EXPECT_EQ(step.now(), 1);
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

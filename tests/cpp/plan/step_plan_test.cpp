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
  step.host_waits("device");
  step.host(7);
  step.host_waits("device");
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

TEST(StepPlan, TheTimeUntilTheHostAsksForACallIsNotExposed) {
  StepPlan step;
  step.set_phase("forward");
  const int64_t call = step.start("dp", 50);
  step.host(30);
  step.wait(call);
  EXPECT_EQ(step.now(), 50);
  EXPECT_EQ(step.waited(), 20);
  EXPECT_EQ(step.phases(), (std::map<std::string, int64_t>{{"forward", 30}}));
  step.host(100);
  step.wait(step.start("dp", 5));
  EXPECT_EQ(step.waited(), 25);
  EXPECT_EQ(step.now(), 135);
}

TEST(StepPlan, TheHostTakesTimeToStartACall) {
  StepPlan step(false, 5);
  step.set_phase("forward");
  const int64_t first = step.start("dp", 50), second = step.start("tp", 50);
  step.wait(first);
  EXPECT_EQ(step.now(), 55);
  step.wait(second);
  EXPECT_EQ(step.now(), 60);
  EXPECT_EQ(step.waited(), 50);  // its host is ready after 10
  StepPlan on_host(true, 5);
  on_host.wait(on_host.start("dp", 50));
  EXPECT_EQ(on_host.now(), 50);
}

TEST(StepPlan, TheHostWaitsForAMarkAndNotForWhatFollows) {
  StepPlan step;
  step.set_phase("step");
  step.compute(100);
  const int64_t mark = step.mark();
  step.compute(50);
  step.host_waits("norm", mark);
  step.host(60);
  step.compute(1);
  EXPECT_EQ(step.now(), 161);  // the host was at 160
  step.host_waits("norm", mark);
  step.compute(1);
  EXPECT_EQ(step.now(), 162);  // that time has passed
  step.host(7);
  EXPECT_EQ(step.mark(), 167);
}

TEST(StepPlan, CountsByPhaseWhatTheHostDoes) {
  for (const bool synchronous : {false, true}) {
    StepPlan step(synchronous);
    step.set_phase("forward");
    step.dispatched();
    step.dispatched();
    step.kernel(3);
    step.wait(step.start("dp", 5));
    step.set_phase("step");
    step.host_waits("device");
    step.host_waits("norm", step.mark());
    step.compute(1);
    step.end();
    const auto counts = step.counts();
    EXPECT_EQ(counts.at("forward").dispatched, 2);
    EXPECT_EQ(counts.at("forward").kernels, 1);
    EXPECT_EQ(counts.at("forward").collectives, 1);
    EXPECT_EQ(counts.at("forward").host_waits, 0);
    EXPECT_EQ(counts.at("step").host_waits, synchronous ? 0 : 2);
    EXPECT_EQ(counts.at("step").kernels, 0);
    EXPECT_EQ(counts.at("step").launches, 1);
    EXPECT_EQ(counts.at("forward").launches, 1);
    EXPECT_EQ(step.now(), 9);
    step.reset();
    EXPECT_TRUE(step.counts().empty());
  }
}

TEST(StepPlan, TheTimelineHasTheHostTheOperationsAndTheCalls) {
  StepPlan step(false, 2);
  step.set_phase("forward");
  step.compute(10, "nobody records");
  EXPECT_TRUE(step.timeline().empty());
  step.reset();
  step.record(true);
  step.host(3);
  step.host(4);  // one row with the host before
  step.compute(10, "mm");
  const int64_t call = step.start("dp", 20, "gather");
  step.compute(1, "add");
  step.wait(call);
  step.host_waits("norm");
  std::vector<std::string> rows;
  for (const StepSpan& one : step.timeline())
    rows.push_back(one.lane + " " + one.name + " " + one.phase + " " + std::to_string(one.begin) + "-" +
                   std::to_string(one.end) + " " + std::to_string(one.exposed));
  EXPECT_EQ(rows, (std::vector<std::string>{"host forward forward 0-7 0", "compute mm forward 7-17 0",
                                            "host gather forward 7-9 0", "dp gather forward 17-37 19",
                                            "compute add forward 17-18 0", "compute waits for gather forward 18-37 0",
                                            "host norm forward 9-37 0"}));
  step.reset();
  EXPECT_TRUE(step.timeline().empty());
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

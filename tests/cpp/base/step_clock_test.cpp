#include "base/step_clock.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

namespace ds {
namespace {

// A clock that goes on by what the test says, in nanoseconds.
struct Told {
  int64_t ns = 0;
  StepClock clock{[this] { return Clock::time_point(std::chrono::nanoseconds(ns)); }};

  int64_t in(Phase phase) { return clock.totals().all[static_cast<size_t>(phase)]; }
  int64_t in_backward(Phase phase) { return clock.totals().in_backward[static_cast<size_t>(phase)]; }
};

TEST(StepClock, ANestedPhasePausesTheOuterOne) {
  Told told;
  told.clock.turn(true);
  told.ns = 1000;  // before the first phase
  const size_t backward = told.clock.enter(Phase::kBackward);
  told.ns += 5;
  const size_t gathers = told.clock.enter(Phase::kGathers);
  told.ns += 7;
  EXPECT_EQ(told.clock.enter(Phase::kCommunication), 0u);  // belongs to the gather
  told.ns += 1;
  const size_t offload = told.clock.enter(Phase::kOffload);
  told.ns += 2;
  told.clock.leave(offload);
  told.clock.leave(gathers);
  told.ns += 3;
  const size_t reduction = told.clock.enter(Phase::kReduction);
  told.ns += 11;
  told.clock.leave(reduction);
  told.clock.leave(backward);
  told.ns += 4;
  const size_t step = told.clock.enter(Phase::kOptimizer);
  told.ns += 6;
  told.clock.enter(Phase::kReduction);  // an exception passes by
  told.ns += 1;
  told.clock.leave(step);
  told.ns += 9;
  EXPECT_EQ(told.in(Phase::kBackward), 8);
  EXPECT_EQ(told.in(Phase::kGathers), 8);
  EXPECT_EQ(told.in(Phase::kOffload), 2);
  EXPECT_EQ(told.in(Phase::kReduction), 12);
  EXPECT_EQ(told.in_backward(Phase::kReduction), 11);
  EXPECT_EQ(told.in(Phase::kOptimizer), 6);
  EXPECT_EQ(told.in(Phase::kRest), 13);
  EXPECT_EQ(told.in(Phase::kCommunication), 0);
  const StepClock::Totals totals = told.clock.totals();
  EXPECT_EQ(totals.wall, 49);
  EXPECT_EQ(std::accumulate(totals.all.begin(), totals.all.end(), int64_t{0}), totals.wall);
}

TEST(StepClock, CountsOneThread) {
  Told told;
  told.clock.turn(true);
  const InPhase backward(told.clock, Phase::kBackward);
  std::thread([&] {
    EXPECT_EQ(told.clock.enter(Phase::kReduction), 0u);
    EXPECT_EQ(told.clock.enter(Phase::kForward), 0u);
    const StepClock::Guest here(told.clock);
    const InPhase reduction(told.clock, Phase::kReduction);
    told.ns += 4;
  }).join();
  told.ns += 3;
  EXPECT_EQ(told.in(Phase::kReduction), 4);
  EXPECT_EQ(told.in(Phase::kBackward), 3);
  const InPhase data(told.clock, Phase::kData);  // the first thread's again
  told.ns += 2;
  EXPECT_EQ(told.in(Phase::kData), 2);
}

TEST(StepClock, APhaseIsOpenForTheCountedThread) {
  Told told;
  told.clock.turn(true);
  EXPECT_FALSE(told.clock.in_phase());
  {
    const InPhase forward(told.clock, Phase::kForward);
    const InPhase gathers(told.clock, Phase::kGathers);
    EXPECT_TRUE(told.clock.in_phase());
    std::thread([&] {
      EXPECT_FALSE(told.clock.in_phase());
      const StepClock::Guest here(told.clock);
      EXPECT_TRUE(told.clock.in_phase());
    }).join();
  }
  EXPECT_FALSE(told.clock.in_phase());
  EXPECT_EQ(told.clock.totals().begun, 2);
}

TEST(StepClock, AReaderBesideTheTrainingIsNotCounted) {
  Told told;
  told.clock.turn(true);
  { const InPhase forward(told.clock, Phase::kForward); }
  std::thread([&] { EXPECT_EQ(told.clock.enter(Phase::kData), 0u); }).join();
  std::thread([&] { EXPECT_NE(told.clock.enter(Phase::kForward), 0u); }).join();  // training goes on in this one
}

TEST(StepClock, EndsTheInnermostPhaseOfAKind) {
  Told told;
  told.clock.turn(true);
  told.clock.enter(Phase::kBackward);
  told.clock.enter(Phase::kReduction);
  told.ns += 2;
  told.clock.leave_last(Phase::kForward);  // there is none
  told.ns += 1;
  told.clock.leave_last(Phase::kBackward);
  told.ns += 5;
  EXPECT_EQ(told.in(Phase::kReduction), 3);
  EXPECT_EQ(told.in(Phase::kRest), 5);
}

TEST(StepClock, CountsWhileSomebodyWantsIt) {
  Told told;
  EXPECT_EQ(told.clock.enter(Phase::kForward), 0u);
  told.clock.turn(true);
  told.clock.turn(true);
  const size_t forward = told.clock.enter(Phase::kForward);
  told.ns += 2;
  told.clock.turn(false);
  told.ns += 3;
  told.clock.leave(forward);
  EXPECT_EQ(told.in(Phase::kForward), 5);
  told.clock.turn(false);
  EXPECT_FALSE(told.clock.on());
  told.ns += 100;
  told.clock.turn(true);
  told.ns += 10;
  told.clock.leave(forward);  // of an earlier time
  const InPhase again(told.clock, Phase::kForward);
  told.ns += 1;
  EXPECT_EQ(told.clock.totals().wall, 6);
}

}  // namespace
}  // namespace ds

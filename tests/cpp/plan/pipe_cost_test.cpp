#include "plan/pipe_cost.h"

#include <gtest/gtest.h>

#include <array>

#include "../error_of.h"
#include "base/error.h"
#include "plan/pipe_schedule.h"

namespace ds::plan {
namespace {

PipeCosts costs_of(int parts, double forward, double input, double weight, int64_t message = 8) {
  PipeCosts costs;
  for (int i = 0; i < parts; ++i) costs.parts.push_back({forward, input, weight, 100, 40, message, 1000});
  return costs;
}

TEST(PipeCost, ByHand) {
  const PipePlan plan = pipe_schedule("1f1b", 2, 1, 2);
  PipeCosts costs = costs_of(2, 1, 2, 0);
  costs.parts[1].forward = 3;
  const PipeCost cost = pipe_cost(plan, costs);
  // Rank 0: F0 0-1, F1 1-2. Rank 1: F0 1-4, B0 4-6, F1 6-9, B1 9-11. Rank 0: B0 6-8, B1 11-13.
  EXPECT_DOUBLE_EQ(cost.seconds, 13);
  EXPECT_DOUBLE_EQ(cost.ranks[0].busy, 6);
  EXPECT_DOUBLE_EQ(cost.ranks[1].busy, 10);
  EXPECT_DOUBLE_EQ(cost.bubble, 1 - 16.0 / 26);
  EXPECT_EQ(cost.ranks[0].peak_live, 2);
  EXPECT_EQ(cost.ranks[0].peak_bytes, 1000 + 200);
  EXPECT_EQ(cost.ranks[1].peak_bytes, 1000 + 100 + 8);  // and the next message, which comes meanwhile
  EXPECT_EQ(cost.ranks[0].bytes_sent, 16);
  EXPECT_EQ(cost.ranks[1].bytes_sent, 16);
}

TEST(PipeCost, MessagesTakeTimeAndHideBehindWork) {
  const PipePlan plan = pipe_schedule("inference", 2, 1, 3);
  PipeCosts costs = costs_of(2, 1, 0, 0);
  costs.latency = 0.5;
  costs.bytes_per_second = 16;  // 8 bytes: half a second
  EXPECT_DOUBLE_EQ(pipe_cost(plan, costs).seconds, 1 + 1 + 3);
  // A stream with room for one message: the next send waits until the receiver has taken the last one.
  costs.parts[1].forward = 4;
  const PipeCost slow = pipe_cost(plan, costs, 1);
  EXPECT_DOUBLE_EQ(slow.ranks[0].acts[3].start, 2);  // send of micro-batch 1: taken was 0 at 2
  EXPECT_DOUBLE_EQ(slow.ranks[0].acts[5].start, 6);  // of micro-batch 2: 1 is taken when 0 is through
}

TEST(PipeCost, HalvesOfABackwardFreeTheirShare) {
  const PipePlan plan = pipe_schedule("zb-h1", 2, 1, 2);
  const PipeCost cost = pipe_cost(plan, costs_of(2, 1, 1, 1, 0));
  // Rank 1: F0 I0 F1 I1 W0 W1: 40 of the first are kept while the second is live.
  EXPECT_EQ(cost.ranks[1].peak_bytes, 1000 + 140);
  EXPECT_EQ(cost.ranks[1].peak_live, 2);
}

TEST(PipeCost, PassesNeedMoreThanWhatIsKept) {
  const auto peak = [](const char* schedule, std::array<int64_t, 4> pass_bytes, int rank) {
    PipeCosts costs = costs_of(2, 1, 1, 1, 0);
    for (PipePart& part : costs.parts) part.pass_bytes = pass_bytes;
    return pipe_cost(pipe_schedule(schedule, 2, 1, 2), costs).ranks[rank].peak_bytes - 1000;
  };
  EXPECT_EQ(peak("1f1b", {0, 0, 500, 500}, 0), 200);      // no halves there
  EXPECT_EQ(peak("1f1b", {130, 0, 0, 0}, 0), 100 + 130);  // the second forward
  EXPECT_EQ(peak("1f1b", {130, 170, 0, 0}, 0), 100 + 170);
  EXPECT_EQ(peak("1f1b", {130, 170, 0, 0}, 1), 170);
  // Rank 1: F0 I0 F1 I1 W0 W1.
  EXPECT_EQ(peak("zb-h1", {130, 0, 0, 0}, 1), 40 + 130);
  EXPECT_EQ(peak("zb-h1", {130, 900, 150, 0}, 1), 40 + 150);
  EXPECT_EQ(peak("zb-h1", {0, 0, 0, 160}, 1), 40 + 160);
}

TEST(PipeCost, FastestPlanThatFits) {
  const PipeCosts one = costs_of(4, 1, 1, 1, 0), two = costs_of(8, 0.5, 0.5, 0.5);
  EXPECT_EQ(fastest_pipe_plan({4, 1, 8}, one, 0).plan.schedule, "zb-h1");
  EXPECT_EQ(fastest_pipe_plan({4, 2, 8}, two, 0).plan.schedule, "interleaved");
  EXPECT_EQ(fastest_pipe_plan({4, 2, 8, PipePlacement::kV}, two, 0).plan.schedule, "zb-v");
  EXPECT_THROW(fastest_pipe_plan({4, 3, 8, PipePlacement::kV}, costs_of(12, 1, 1, 1), 0), Error);
  // A whole backward is taken where splitting gains nothing.
  EXPECT_EQ(fastest_pipe_plan({4, 1, 8}, costs_of(4, 1, 2, 0), 0).plan.schedule, "1f1b");
  EXPECT_EQ(fastest_pipe_plan({1, 1, 8}, costs_of(1, 1, 1, 1), 0).plan.schedule, "1f1b");
  // 1f1b and zb-h1 hold four micro-batches on stage 0; later stages of zb-h1 hold parts of more.
  EXPECT_EQ(fastest_pipe_plan({4, 1, 8}, one, 1400).plan.schedule, "zb-h1");
  EXPECT_EQ(error_of([&] {
              fastest_pipe_plan({4, 1, 8}, one, 1399);
            }),
            "no pipeline schedule fits into pipeline.memory_limit 1399: the leanest, 1f1b, needs 1400 bytes on stage 0 "
            "(4 live activations): use more stages, smaller micro-batches or activation checkpointing");
}

TEST(PipeCost, Timeline) {
  const PipePlan plan = pipe_schedule("1f1b", 2, 1, 2);
  const PipeCost cost = pipe_cost(plan, equal_costs(plan));
  EXPECT_EQ(pipe_timeline(plan, cost, 18),
            "stage 0 |F0-F1-...B0-...B1-|\n"
            "stage 1 |...F0-B0-F1-B1-...|\n");
  EXPECT_THROW(pipe_timeline(plan, cost, 0), Error);
}

TEST(PipeCost, Slots) {
  const PipePlan plan = pipe_schedule("1f1b", 3, 1, 4);
  for (int rank = 0; rank < 3; ++rank) {
    const auto slots = pipe_slots(plan, rank);
    EXPECT_EQ(slots.size(), 2u * (4 + 3 - 1));
    std::vector<PipeAct> all;
    for (const auto& slot : slots) {
      int passes = 0;
      for (const PipeAct& act : slot) passes += computes(act.op);
      EXPECT_LE(passes, 1);
      all.insert(all.end(), slot.begin(), slot.end());
    }
    EXPECT_EQ(all, plan.ranks[rank]);
  }
  // A send is in the slot after the pass that made it.
  const auto slots = pipe_slots(pipe_schedule("inference", 3, 1, 2), 1);
  ASSERT_EQ(slots.size(), 4u);
  EXPECT_TRUE(slots[0].empty());
  EXPECT_EQ(slots[1].size(), 2u);
  EXPECT_EQ(slots[2].size(), 3u);
  EXPECT_EQ(slots[3].size(), 1u);
  EXPECT_THROW(pipe_slots(plan, 3), Error);
}

TEST(PipeCost, BadInput) {
  const PipePlan plan = pipe_schedule("1f1b", 2, 1, 2);
  EXPECT_THROW(pipe_cost(plan, costs_of(3, 1, 1, 1)), Error);
  EXPECT_THROW(pipe_cost(plan, costs_of(2, -1, 1, 1)), Error);
}

}  // namespace
}  // namespace ds::plan

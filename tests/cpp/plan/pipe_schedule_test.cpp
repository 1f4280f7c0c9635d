#include "plan/pipe_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "../error_of.h"
#include "base/error.h"
#include "pipe_machine.h"
#include "plan/pipe_check.h"
#include "plan/pipe_cost.h"

namespace ds::plan {
namespace {

std::vector<int> chunks_of(const PipeScheduleKind& kind) {
  std::vector<int> all;
  for (int v = kind.min_chunks; v <= std::min(kind.max_chunks, 4); ++v) all.push_back(v);
  return all;
}

// F0 F1 B0 ...: what one rank computes.
std::string passes(const PipePlan& plan, int rank) {
  std::string out;
  for (const PipeAct& act : plan.ranks[rank])
    if (computes(act.op)) {
      out += (out.empty() ? "" : " ") + std::string(1, "FBIW"[static_cast<int>(act.op)]) + std::to_string(act.micro);
      if (plan.shape.chunks > 1) out += std::string(1, "abcd"[act.chunk]);
    }
  return out;
}

TEST(PipeSchedule, EveryShapeIsProvenAndRuns) {
  for (const PipeScheduleKind& kind : pipe_schedule_kinds())
    for (int p = 1; p <= 8; ++p)
      for (int v : chunks_of(kind))
        for (int m = 1; m <= 32; ++m) {
          const PipePlan plan = pipe_schedule(kind.name, p, v, m);
          SCOPED_TRACE(kind.name + " p " + std::to_string(p) + " v " + std::to_string(v) + " m " + std::to_string(m));
          ASSERT_NO_THROW(pipe_check(plan, 1));
          ASSERT_NO_THROW(pipe_check(plan));
          ASSERT_EQ(PipeMachine(plan, 1).run(), "");
        }
}

TEST(PipeSchedule, AnInferenceGoesDownAndUpAgain) {
  for (int p = 1; p <= 8; ++p)
    for (int v = 1; v <= 4; ++v)
      for (int m = 1; m <= 9; ++m) {
        const PipePlan plan = pipe_schedule("inference", p, v, m, PipePlacement::kV);
        ASSERT_NO_THROW(pipe_check(plan, 1)) << p << " " << v << " " << m;
        ASSERT_EQ(PipeMachine(plan, 1).run(), "");
        for (int buffers : plan.buffers) EXPECT_LE(buffers, v * p);
      }
}

TEST(PipeSchedule, RanksAsThreads) {
  unsigned seed = 1;
  for (const PipeScheduleKind& kind : pipe_schedule_kinds())
    for (int p : {2, 3, 4, 8})
      for (int v : chunks_of(kind))
        for (int m : {1, 7, 16}) {
          const PipePlan plan = pipe_schedule(kind.name, p, v, m);
          for (int bound : {1, 2})
            ASSERT_EQ(PipeMachine(plan, bound).run_as_threads(seed++), "")
                << kind.name << " " << p << " " << v << " " << m;
        }
}

TEST(PipeSchedule, Orders) {
  EXPECT_EQ(passes(pipe_schedule("gpipe", 2, 1, 3), 0), "F0 F1 F2 B0 B1 B2");
  EXPECT_EQ(passes(pipe_schedule("1f1b", 3, 1, 4), 0), "F0 F1 F2 B0 F3 B1 B2 B3");
  EXPECT_EQ(passes(pipe_schedule("1f1b", 3, 1, 4), 2), "F0 B0 F1 B1 F2 B2 F3 B3");
  EXPECT_EQ(passes(pipe_schedule("interleaved", 2, 2, 2), 0), "F0a F1a F0b F1b B0b B1b B0a B1a");
  EXPECT_EQ(passes(pipe_schedule("interleaved", 2, 2, 2), 1), "F0a F1a F0b B0b F1b B1b B0a B1a");
  EXPECT_EQ(passes(pipe_schedule("zb-h1", 2, 1, 3), 0), "F0 F1 I0 W0 F2 I1 W1 I2 W2");
  EXPECT_EQ(passes(pipe_schedule("zb-h1", 2, 1, 3), 1), "F0 I0 F1 I1 W0 F2 I2 W1 W2");
}

TEST(PipeSchedule, BubblesAtEqualCosts) {
  const auto bubble = [](const std::string& name, int p, int v, int m) {
    const PipePlan plan = pipe_schedule(name, p, v, m);
    return pipe_cost(plan, equal_costs(plan)).bubble;
  };
  for (int p = 1; p <= 8; ++p)
    for (int m = p; m <= 32; ++m) {
      SCOPED_TRACE("p " + std::to_string(p) + " m " + std::to_string(m));
      const double filling = p - 1;
      EXPECT_NEAR(bubble("1f1b", p, 1, m), filling / (m + filling), 1e-12);
      EXPECT_NEAR(bubble("gpipe", p, 1, m), filling / (m + filling), 1e-12);
      EXPECT_NEAR(bubble("zb-h1", p, 1, m), filling / (3 * m + filling), 1e-12);
      if (m % p == 0) {
        for (int v = 2; v <= 4; ++v) EXPECT_NEAR(bubble("interleaved", p, v, m), filling / (v * m + filling), 1e-12);
      }
      if (m >= 2 * p && p > 1) {
        EXPECT_LT(bubble("zb-v", p, 2, m), bubble("zb-h1", p, 1, m));
        EXPECT_LT(bubble("dualpipe-v", p, 2, m), bubble("1f1b", p, 1, m));
      }
    }
}

TEST(PipeSchedule, LiveActivationsAreBounded) {
  for (int p = 1; p <= 8; ++p)
    for (int m = 1; m <= 32; ++m) {
      const auto live = [&](const std::string& name, int v, int rank) {
        const PipePlan plan = pipe_schedule(name, p, v, m);
        const int peak = pipe_cost(plan, equal_costs(plan)).ranks[rank].peak_live;
        EXPECT_GE(plan.buffers[rank], peak);
        return peak;
      };
      EXPECT_EQ(live("gpipe", 1, 0), m);
      for (int rank = 0; rank < p; ++rank) {
        EXPECT_EQ(live("1f1b", 1, rank), std::min(p - rank, m));
        EXPECT_LE(live("zb-h1", 1, rank), p);
        EXPECT_LE(live("zb-v", 2, rank), 2 * p);
        EXPECT_LE(live("dualpipe-v", 2, rank), 2 * p + 1);
        EXPECT_LE(live("interleaved", 2, rank), 3 * p - 1);
      }
    }
}

// No more buffers than there are live activations, where nothing is handed over on the same rank.
TEST(PipeSchedule, BuffersAreReused) {
  for (const char* name : {"1f1b", "gpipe", "zb-h1"}) {
    const PipePlan plan = pipe_schedule(name, 4, 1, 16);
    const PipeCost cost = pipe_cost(plan, equal_costs(plan));
    for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(plan.buffers[rank], cost.ranks[rank].peak_live) << name << rank;
  }
}

TEST(PipeSchedule, BadInput) {
  EXPECT_EQ(
      error_of([] { pipe_schedule("2f2b", 2, 1, 2); }),
      "there is no pipeline schedule \"2f2b\": there are 1f1b, gpipe, interleaved, zb-h1, zb-v, dualpipe-v, inference");
  EXPECT_EQ(
      error_of([] { pipe_schedule("zb-v", 2, 1, 4); }),
      "the pipeline schedule zb-v wants 2 chunks of layers on each rank, not 1: set PipelineModule(virtual_stages=) "
      "or choose another schedule");
  EXPECT_TRUE(says(error_of([] { pipe_schedule("interleaved", 2, 1, 4); }), "wants at least 2 chunks"));
  EXPECT_TRUE(says(error_of([] { pipe_schedule("1f1b", 2, 3, 4); }), "wants 1 chunk of"));
  EXPECT_TRUE(says(error_of([] { pipe_schedule("1f1b", 2, 1, 0); }), "0 micro-batches"));
}

}  // namespace
}  // namespace ds::plan

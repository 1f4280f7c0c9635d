#include "plan/pipe_check.h"

#include <gtest/gtest.h>

#include <random>

#include "../error_of.h"
#include "base/error.h"
#include "pipe_machine.h"
#include "plan/pipe_schedule.h"

namespace ds::plan {
namespace {

std::string verdict(const PipePlan& plan, int bound = kPipeSendBound) {
  return failure_of<Error>([&] { pipe_check(plan, bound); });
}

// One random change of one rank's list.
void corrupt(PipePlan& plan, std::mt19937& random) {
  auto& acts = plan.ranks[random() % plan.ranks.size()];
  if (acts.empty()) return;
  const size_t at = random() % acts.size();
  PipeAct& act = acts[at];
  switch (random() % 9) {
    case 0: acts.erase(acts.begin() + static_cast<std::ptrdiff_t>(at)); break;
    case 1: acts.insert(acts.begin() + static_cast<std::ptrdiff_t>(random() % acts.size()), PipeAct(act)); break;
    case 2: std::swap(act, acts[random() % acts.size()]); break;
    case 3: std::swap(act, acts[std::min(at + 1, acts.size() - 1)]); break;
    case 4: act.micro = static_cast<int>(random() % (plan.shape.micro_batches + 1)); break;
    case 5: act.chunk = static_cast<int>(random() % (plan.shape.chunks + 1)); break;
    case 6: act.buffer = static_cast<int>(random() % (plan.buffers[0] + 1)) - (random() % 8 == 0); break;
    case 7: act.peer = static_cast<int>(random() % (plan.shape.stages + 1)) - 1; break;
    case 8: act.op = static_cast<PipeOp>(random() % kPipeOps); break;
  }
}

// The check refuses exactly what a machine cannot run: with buffers, messages and bounded streams of its own.
TEST(PipeCheck, RandomCorruptionsAreFound) {
  std::mt19937 random(17);
  int broken = 0, fine = 0;
  for (int trial = 0; trial < 40000; ++trial) {
    const auto& kinds = pipe_schedule_kinds();
    const PipeScheduleKind& kind = kinds[random() % kinds.size()];
    const int v = std::min(kind.max_chunks, kind.min_chunks + static_cast<int>(random() % 2));
    PipePlan plan = pipe_schedule(kind.name, 1 + static_cast<int>(random() % 4), v, 1 + static_cast<int>(random() % 6));
    for (unsigned i = 0; i <= random() % 2; ++i) corrupt(plan, random);
    const int bound = 1 + static_cast<int>(random() % 2);
    const std::string text = verdict(plan, bound), runs = PipeMachine(plan, bound).run();
    ASSERT_EQ(text.empty(), runs.empty()) << kind.name << " p " << plan.shape.stages << " v " << v << " m "
                                          << plan.shape.micro_batches << "\ncheck: " << text << "\nmachine: " << runs;
    ++(text.empty() ? fine : broken);
    if (!text.empty()) {
      EXPECT_TRUE(says(text, "rank "));
    }
  }
  EXPECT_GT(broken, 20000);
  EXPECT_GT(fine, 1000);
}

PipePlan two_stages() { return pipe_schedule("1f1b", 2, 1, 2); }

size_t index_of_act(const PipePlan& plan, int rank, PipeOp op, int micro) {
  for (size_t i = 0; i < plan.ranks[rank].size(); ++i)
    if (plan.ranks[rank][i].op == op && plan.ranks[rank][i].micro == micro) return i;
  return plan.ranks[rank].size();
}

TEST(PipeCheck, SaysWhereAndWhat) {
  PipePlan plan = two_stages();
  plan.ranks[1].erase(plan.ranks[1].begin() + static_cast<std::ptrdiff_t>(index_of_act(plan, 1, PipeOp::kSendGrad, 1)));
  EXPECT_EQ(verdict(plan),
            "pipeline schedule 1f1b, rank 1, step 7 (its end): SendGrad of micro-batch 1 in chunk 0 never happens");

  plan = two_stages();
  plan.ranks[0][index_of_act(plan, 0, PipeOp::kForward, 1)].buffer = 0;
  EXPECT_EQ(verdict(plan),
            "pipeline schedule 1f1b, rank 0, step 2, ForwardPass(micro 1, chunk 0, buffer 0): buffer 0 still holds "
            "micro-batch 0 of chunk 0, whose RecvGrad is still to come");

  plan = two_stages();
  plan.ranks[1][index_of_act(plan, 1, PipeOp::kBackward, 0)].op = PipeOp::kForward;
  EXPECT_EQ(verdict(plan),
            "pipeline schedule 1f1b, rank 1, step 2, ForwardPass(micro 0, chunk 0, buffer 0): happens twice: each "
            "instruction stands once for each micro-batch and chunk");

  plan = two_stages();
  plan.ranks[0][index_of_act(plan, 0, PipeOp::kSendActivation, 0)].peer = 0;
  EXPECT_TRUE(says(verdict(plan),
                   "rank 0, step 1, SendActivation(micro 0, chunk 0, buffer 0, to rank 0): the next part of "
                   "the model is on rank 1"));
}

TEST(PipeCheck, StreamsArriveInTheOrderInWhichTheyWereSent) {
  PipePlan plan = pipe_schedule("gpipe", 2, 1, 2);
  auto& acts = plan.ranks[0];
  std::swap(acts[index_of_act(plan, 0, PipeOp::kRecvGrad, 0)], acts[index_of_act(plan, 0, PipeOp::kRecvGrad, 1)]);
  std::swap(acts[index_of_act(plan, 0, PipeOp::kBackward, 0)], acts[index_of_act(plan, 0, PipeOp::kBackward, 1)]);
  EXPECT_EQ(
      verdict(plan),
      "pipeline schedule gpipe, rank 0, step 4, RecvGrad(micro 1, chunk 0, buffer 1, from rank 1): this is number 0 "
      "that rank 0 receives from rank 1 in this direction, but rank 1 sends as number 0 (step 5) SendGrad(micro 0, "
      "chunk 0, buffer 0, to rank 0): bring the sends of one rank and the recvs of the other into one order");
}

// Rank 0 sends both activations before it receives, rank 1 both gradients: with room for one message both wait.
TEST(PipeCheck, DeadlocksAreFound) {
  PipePlan plan = pipe_schedule("1f1b", 2, 1, 3);
  auto& acts = plan.ranks[1];
  const size_t from = index_of_act(plan, 1, PipeOp::kRecvActivation, 1),
               to = index_of_act(plan, 1, PipeOp::kSendGrad, 0);
  std::rotate(acts.begin() + static_cast<std::ptrdiff_t>(to), acts.begin() + static_cast<std::ptrdiff_t>(from),
              acts.begin() + static_cast<std::ptrdiff_t>(from) + 1);
  for (PipeAct& act : acts) act.buffer = act.micro;  // each its own
  plan.buffers[1] = 3;
  EXPECT_EQ(verdict(plan), "");
  // Now rank 1 wants the third activation before it gives the first gradient, which rank 0 waits for.
  const size_t third = index_of_act(plan, 1, PipeOp::kRecvActivation, 2),
               first = index_of_act(plan, 1, PipeOp::kSendGrad, 0);
  std::rotate(acts.begin() + static_cast<std::ptrdiff_t>(first), acts.begin() + static_cast<std::ptrdiff_t>(third),
              acts.begin() + static_cast<std::ptrdiff_t>(third) + 1);
  EXPECT_EQ(
      verdict(plan),
      "pipeline schedule 1f1b: deadlock with 2 messages on their way at most; these wait for each other: rank 0, "
      "step 4, RecvGrad(micro 0, chunk 0, buffer 0, from rank 1); rank 1, step 4, RecvActivation(micro 2, chunk 0, "
      "buffer 2, from rank 0)");
  EXPECT_NE(PipeMachine(plan, 2).run(), "");
}

TEST(PipeCheck, WrongNumbersOfLists) {
  PipePlan plan = two_stages();
  plan.ranks.pop_back();
  EXPECT_TRUE(says(verdict(plan), "instructions for 1 ranks"));
  EXPECT_TRUE(says(verdict(two_stages(), 0), "room for at least one message"));
}

}  // namespace
}  // namespace ds::plan

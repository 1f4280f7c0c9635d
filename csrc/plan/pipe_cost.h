// The cost of a pipeline's plan, computed before the run from the time and the memory of each part.
//
// A rank does one thing at a time, in the order of its list. Sends leave at once and take none of its time; a recv ends
// when its message has come, which had `latency + bytes / bytes_per_second` to travel since its send; a send waits
// where `send_bound` messages of its stream have not been received. The *bubble* is the share of the ranks' time, from
// the start of the first to the end of the last, in which they compute nothing.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/pipe_check.h"
#include "plan/pipe_plan.h"

namespace ds::plan {

// The cost of one part of the model (virtual stage) for one micro-batch. Parts are in the order of the layers.
struct PipePart {
  double forward = 1;         // seconds
  double backward_input = 1;  // a whole backward takes both
  double backward_weight = 1;
  int64_t activation_bytes = 0;  // kept from the forward to the end of the backward
  int64_t weight_bytes = 0;      // kept between the two halves of a backward
  int64_t output_bytes = 0;      // go to the next part; the gradient that comes back has as many
  int64_t state_bytes = 0;       // parameters, gradients, optimizer states: always there
  // The most bytes that a pass needs while it runs, with those that its micro-batch keeps; by PipeOp, kForward to
  // kBackwardWeight. 0: no more than what is kept before and after it.
  std::array<int64_t, 4> pass_bytes{};
};

struct PipeCosts {
  std::vector<PipePart> parts;
  double latency = 0;           // of a message, in seconds
  double bytes_per_second = 0;  // 0: messages take their latency only
};

struct PipeSpan {
  double start, end;  // seconds
};

struct PipeRankCost {
  double busy = 0;         // seconds
  int peak_live = 0;       // micro-batches, by part, between forward and the end of backward
  int64_t peak_bytes = 0;  // states, what is live, what a pass needs while it runs, messages that wait
  int64_t bytes_sent = 0;
  std::vector<PipeSpan> acts;  // when each instruction runs
};

struct PipeCost {
  double seconds = 0;  // of a batch
  double bubble = 0;   // 0 to 1
  std::vector<PipeRankCost> ranks;
};

// Returns the cost of a plan that pipe_check passes.
PipeCost pipe_cost(const PipePlan& plan, const PipeCosts& costs, int send_bound = kPipeSendBound);

// Every part takes one second for each of its passes (a whole backward too, where the plan does not split any).
PipeCosts equal_costs(const PipePlan& plan);

struct PipeChoice {
  PipePlan plan;
  PipeCost cost;
};

// The schedule that is through first, of those that go with the chunks and the placement of `shape` and need at most
// `memory_limit` bytes on each rank (0: any). ErrorKind::kValue where none fits: what the leanest one needs, and where.
PipeChoice fastest_pipe_plan(const PipeShape& shape, const PipeCosts& costs, int64_t memory_limit);

// A line of `width` characters for each rank: F, B, I (gradients of inputs) and W (of weights) with the number of the
// micro-batch, dots for idle time; lower case for odd chunks.
std::string pipe_timeline(const PipePlan& plan, const PipeCost& cost, int width);

// The instructions of one rank by time slot, where each pass takes one: those between two passes are in the slot of the
// pass that needs them (recvs) or in the one after (sends). Slots without work are empty.
std::vector<std::vector<PipeAct>> pipe_slots(const PipePlan& plan, int rank);

}  // namespace ds::plan

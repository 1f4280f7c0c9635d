#include "plan/pipe_cost.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ranges.h"
#include "plan/pipe_schedule.h"

namespace ds::plan {
namespace {

double seconds_of(const PipePart& part, PipeOp op) {
  switch (op) {
    case PipeOp::kForward: return part.forward;
    case PipeOp::kBackward: return part.backward_input + part.backward_weight;
    case PipeOp::kBackwardInput: return part.backward_input;
    case PipeOp::kBackwardWeight: return part.backward_weight;
    default: return 0;
  }
}

void check_costs(const PipePlan& plan, const PipeCosts& costs) {
  const int wanted = plan.shape.virtual_stages(), given = static_cast<int>(costs.parts.size());
  if (given != wanted)
    fail(ErrorKind::kValue, "costs of ", given, " parts are given: the pipeline has ", wanted, " (", plan.shape.stages,
         " stages x ", plan.shape.chunks, " chunks)");
  for (int i = 0; i < given; ++i) {
    const PipePart& part = costs.parts[i];
    for (double time : {part.forward, part.backward_input, part.backward_weight})
      if (!(time >= 0) || std::isinf(time))
        fail(ErrorKind::kValue, "part ", i, " of the pipeline takes ", time,
             " seconds: times are finite and at least 0");
    std::vector<int64_t> all{part.activation_bytes, part.weight_bytes, part.output_bytes, part.state_bytes};
    append(all, part.pass_bytes);
    for (const int64_t bytes : all)
      if (bytes < 0)
        fail(ErrorKind::kValue, "part ", i, " of the pipeline has ", bytes, " bytes: there are none below 0");
  }
}

// The bytes that a micro-batch keeps in one part before a pass and after it.
std::pair<int64_t, int64_t> kept_around(const PipePart& part, PipeOp op) {
  switch (op) {
    case PipeOp::kForward: return {0, part.activation_bytes};
    case PipeOp::kBackward: return {part.activation_bytes, 0};
    case PipeOp::kBackwardInput: return {part.activation_bytes, part.weight_bytes};
    default: return {part.weight_bytes, 0};
  }
}

// A message from when it comes to when it is received; from then on it is part of what is live.
struct Waiting {
  double came, received;
  int64_t bytes;
};

// The most that waits at a time between `start` and `end`. `messages`: those that are received later, in that order.
int64_t waiting_bytes(const std::vector<Waiting>& messages, size_t from, double start, double end) {
  constexpr size_t kNext = 16;  // no more have come: a stream has kPipeSendBound on their way
  int64_t bytes = 0;
  for (size_t index = from; index < std::min(messages.size(), from + kNext); ++index)
    if (messages[index].came < end && messages[index].received > start) bytes += messages[index].bytes;
  return bytes;
}

// Memory of one rank while its list runs.
void measure_memory(const PipePlan& plan, const PipeCosts& costs, int rank, const std::vector<Waiting>& messages,
                    PipeRankCost& out) {
  size_t received = 0;
  int64_t bytes = 0;
  int live = 0;
  for (int chunk = 0; chunk < plan.shape.chunks; ++chunk)
    bytes += costs.parts[plan.shape.virtual_stage(rank, chunk)].state_bytes;
  out.peak_bytes = bytes;
  for (size_t step = 0; step < plan.ranks[rank].size(); ++step) {
    const PipeAct& act = plan.ranks[rank][step];
    const int stage = plan.shape.virtual_stage(rank, act.chunk);
    const PipePart& part = costs.parts[stage];
    received += receives(act.op);
    if (sends(act.op))
      out.bytes_sent += act.op == PipeOp::kSendActivation ? part.output_bytes : costs.parts[stage - 1].output_bytes;
    if (!computes(act.op)) continue;
    const auto [before, after] = kept_around(part, act.op);
    const PipeSpan& span = out.acts[step];
    const int64_t others = bytes - before, waits = waiting_bytes(messages, received, span.start, span.end);
    out.peak_bytes = std::max(out.peak_bytes,
                              others + waits + std::max({before, after, part.pass_bytes[static_cast<size_t>(act.op)]}));
    if (act.op == PipeOp::kForward) out.peak_live = std::max(out.peak_live, ++live);
    const bool over = act.op == PipeOp::kBackward || act.op == PipeOp::kBackwardWeight || !plan.trains;
    bytes = others + (over ? 0 : after);
    if (over) --live;
  }
}

// The state of times while a plan runs.
class PipeClock {
 public:
  PipeClock(const PipePlan& plan, const PipeCosts& costs, int send_bound, PipeCost& out)
      : plan_(plan),
        costs_(costs),
        bound_(static_cast<size_t>(send_bound)),
        out_(out),
        now_(plan.ranks.size(), 0),
        sent_(pipe_streams(plan.shape)),
        received_(sent_.size()),
        waiting_(plan.ranks.size()) {}

  void visit(int rank, size_t step) {
    const PipeAct& act = plan_.ranks[rank][step];
    const int stage = plan_.shape.virtual_stage(rank, act.chunk);
    PipeRankCost& of = out_.ranks[rank];
    double start = now_[rank];
    const double takes = seconds_of(costs_.parts[stage], act.op);
    of.busy += takes;
    if (!computes(act.op)) {
      const size_t stream = pipe_stream(plan_.shape, rank, act);
      auto& sent = sent_[stream];
      auto& received = received_[stream];
      if (sends(act.op)) {
        if (sent.size() >= bound_) start = std::max(start, received[sent.size() - bound_]);
        const int made_by = act.op == PipeOp::kSendActivation ? stage : stage - 1;
        sent.push_back(start + travel(costs_.parts[made_by].output_bytes));
      } else {
        const double came = sent[received.size()];
        start = std::max(start, came);
        const int made_by = act.op == PipeOp::kRecvActivation ? stage - 1 : stage;
        waiting_[rank].push_back({came, start, costs_.parts[made_by].output_bytes});
        received.push_back(start);
      }
    }
    of.acts[step] = {start, start + takes};
    now_[rank] = start + takes;
  }

  const std::vector<Waiting>& waiting(size_t rank) const { return waiting_[rank]; }
  double latest() const { return *std::max_element(now_.begin(), now_.end()); }

 private:
  double travel(int64_t bytes) const {
    return costs_.latency + (costs_.bytes_per_second > 0 ? static_cast<double>(bytes) / costs_.bytes_per_second : 0);
  }

  const PipePlan& plan_;
  const PipeCosts& costs_;
  size_t bound_;
  PipeCost& out_;
  std::vector<double> now_;                           // of each rank
  std::vector<std::vector<double>> sent_, received_;  // of each stream: when messages arrive, when they are taken
  std::vector<std::vector<Waiting>> waiting_;         // of each rank
};

}  // namespace

PipeCost pipe_cost(const PipePlan& plan, const PipeCosts& costs, int send_bound) {
  check_costs(plan, costs);
  PipeCost out;
  out.ranks.resize(plan.ranks.size());
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank) out.ranks[rank].acts.resize(plan.ranks[rank].size());
  PipeClock clock(plan, costs, send_bound, out);
  const auto came = pipe_walk(plan, send_bound, [&](int rank, size_t step) { clock.visit(rank, step); });
  for (size_t rank = 0; rank < came.size(); ++rank)
    if (came[rank] != plan.ranks[rank].size()) pipe_check(plan, send_bound);  // says why
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank)
    measure_memory(plan, costs, static_cast<int>(rank), clock.waiting(rank), out.ranks[rank]);
  out.seconds = clock.latest();
  double busy = 0;
  for (const PipeRankCost& rank : out.ranks) busy += rank.busy;
  out.bubble = out.seconds > 0 ? 1 - busy / (out.seconds * plan.shape.stages) : 0;
  return out;
}

PipeCosts equal_costs(const PipePlan& plan) {
  bool splits = false;
  for (const auto& acts : plan.ranks)
    for (const PipeAct& act : acts) splits = splits || act.op == PipeOp::kBackwardInput;
  PipeCosts costs;
  costs.parts.resize(plan.shape.virtual_stages());
  if (!splits)
    for (PipePart& part : costs.parts) part.backward_weight = 0;
  return costs;
}

PipeChoice fastest_pipe_plan(const PipeShape& shape, const PipeCosts& costs, int64_t memory_limit) {
  std::optional<PipeChoice> best, leanest;
  const auto need = [](const PipeChoice& choice) {
    int64_t most = 0;
    for (const PipeRankCost& rank : choice.cost.ranks) most = std::max(most, rank.peak_bytes);
    return most;
  };
  for (const PipeScheduleKind& kind : pipe_schedule_kinds()) {
    if (!kind.trains || shape.chunks < kind.min_chunks || shape.chunks > kind.max_chunks) continue;
    if (shape.chunks > 1 && kind.placement != shape.placement) continue;
    PipeChoice choice{pipe_schedule(kind.name, shape.stages, shape.chunks, shape.micro_batches), {}};
    choice.cost = pipe_cost(choice.plan, costs);
    const int64_t bytes = need(choice);
    if (!leanest || bytes < need(*leanest)) leanest = choice;
    if (memory_limit > 0 && bytes > memory_limit) continue;
    // The first of equal choices wins: a whole backward where splitting it gains nothing.
    if (!best || choice.cost.seconds < best->cost.seconds * (1 - 1e-9)) best = std::move(choice);
  }
  if (best) return *best;
  if (!leanest)
    fail(ErrorKind::kValue, "no pipeline schedule has ", shape.chunks,
         " chunks on each rank that are placed down and up again: use two, or the placement loop");
  size_t at = 0;
  for (size_t rank = 1; rank < leanest->cost.ranks.size(); ++rank)
    if (leanest->cost.ranks[rank].peak_bytes > leanest->cost.ranks[at].peak_bytes) at = rank;
  fail(ErrorKind::kValue, "no pipeline schedule fits into pipeline.memory_limit ", memory_limit, ": the leanest, ",
       leanest->plan.schedule, ", needs ", need(*leanest), " bytes on stage ", at, " (",
       leanest->cost.ranks[at].peak_live,
       " live activations): use more stages, smaller micro-batches or activation checkpointing");
}

}  // namespace ds::plan

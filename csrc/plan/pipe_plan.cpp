#include "plan/pipe_plan.h"

#include <algorithm>

#include "base/error.h"
#include "base/sizes.h"

namespace ds::plan {
namespace {

constexpr const char* kPipeOpNames[kPipeOps] = {"ForwardPass",        "BackwardPass",   "BackwardInputPass",
                                                "BackwardWeightPass", "SendActivation", "RecvActivation",
                                                "SendGrad",           "RecvGrad"};

// Gives out the buffers of one rank.
class PipeBuffers {
 public:
  explicit PipeBuffers(const PipeShape& shape)
      : micros_(shape.micro_batches),
        held_(shape.chunks * micros_, -1),
        input_done_(held_.size(), false),
        all_done_(held_.size(), false) {}

  int take(int micro, int chunk) {
    const auto free = std::find(used_.begin(), used_.end(), false);
    const int buffer = static_cast<int>(free - used_.begin());
    if (free == used_.end()) used_.push_back(false);
    used_[buffer] = true;
    return held_[at(micro, chunk)] = buffer;
  }
  int held(int micro, int chunk) const { return held_[at(micro, chunk)]; }
  void input_done(int micro, int chunk) { input_done_[at(micro, chunk)] = true; }
  void all_done(int micro, int chunk) { all_done_[at(micro, chunk)] = true; }
  bool is_input_done(int micro, int chunk) const { return input_done_[at(micro, chunk)]; }
  bool is_all_done(int micro, int chunk) const { return all_done_[at(micro, chunk)]; }
  void give(int micro, int chunk) { used_[held(micro, chunk)] = false; }
  int count() const { return static_cast<int>(used_.size()); }

 private:
  int at(int micro, int chunk) const { return chunk * micros_ + micro; }

  int micros_;
  std::vector<int> held_;
  std::vector<bool> input_done_, all_done_, used_;
};

}  // namespace

const char* pipe_op_name(PipeOp op) { return kPipeOpNames[static_cast<int>(op)]; }

PipeOp pipe_op_named(const std::string& name) {
  std::string known;
  for (int op = 0; op < kPipeOps; ++op) {
    if (name == kPipeOpNames[op]) return static_cast<PipeOp>(op);
    known += std::string(op ? ", " : "") + kPipeOpNames[op];
  }
  fail(ErrorKind::kValue, "there is no pipeline instruction ", name, ": there are ", known);
}

bool PipeAct::operator==(const PipeAct& other) const {
  return op == other.op && micro == other.micro && chunk == other.chunk && buffer == other.buffer && peer == other.peer;
}

std::string text(const PipeAct& act) {
  std::string out = std::string(pipe_op_name(act.op)) + "(micro " + std::to_string(act.micro) + ", chunk " +
                    std::to_string(act.chunk) + ", buffer " + std::to_string(act.buffer);
  if (!computes(act.op)) out += std::string(sends(act.op) ? ", to" : ", from") + " rank " + std::to_string(act.peer);
  return out + ")";
}

int PipeShape::other_rank(int virtual_stage, int step) const {
  const int neighbour = virtual_stage + step;
  if (neighbour < 0 || neighbour >= virtual_stages()) return -1;
  const int rank = rank_of(neighbour);
  return rank == rank_of(virtual_stage) ? -1 : rank;
}

void PipeShape::check() const {
  if (stages < 1 || chunks < 1 || micro_batches < 1)
    fail(ErrorKind::kValue, "a pipeline has at least one stage, one chunk and one micro-batch, not ", stages,
         " stages, ", chunks, " chunks and ", micro_batches, " micro-batches");
  sizes::product("4 x stages x chunks x micro-batches of a pipeline", 4, stages, chunks, micro_batches);
}

PipePlan pipe_plan(const std::string& schedule, const PipeShape& shape, bool trains,
                   const std::vector<std::vector<PipeAct>>& computing) {
  shape.check();
  PipePlan plan{schedule, shape, trains, {}, {}};
  for (int rank = 0; rank < shape.stages; ++rank) {
    PipeBuffers buffers(shape);
    std::vector<PipeAct> acts;
    for (const PipeAct& act : computing.at(rank)) {
      const int m = act.micro, c = act.chunk, part = shape.virtual_stage(rank, c);
      const int before = shape.other_rank(part, -1), after = shape.other_rank(part, 1);
      // A part of this rank hands over to the next one, or takes from it: its chunk, or -1.
      const int local_before = part > 0 && before < 0 ? shape.chunk_of(part - 1) : -1;
      const int local_after = part + 1 < shape.virtual_stages() && after < 0 ? shape.chunk_of(part + 1) : -1;
      if (act.op == PipeOp::kForward) {
        const int b = buffers.take(m, c);
        if (before >= 0) acts.push_back({PipeOp::kRecvActivation, m, c, b, before});
        acts.push_back({act.op, m, c, b, -1});
        if (after >= 0) acts.push_back({PipeOp::kSendActivation, m, c, b, after});
        if (!trains) {  // whoever read what is here has it now
          if (local_before >= 0) buffers.give(m, local_before);
          if (local_after < 0) buffers.give(m, c);
        }
        continue;
      }
      const int b = buffers.held(m, c);
      if (act.op != PipeOp::kBackwardWeight) {
        if (after >= 0) acts.push_back({PipeOp::kRecvGrad, m, c, b, after});
        acts.push_back({act.op, m, c, b, -1});
        if (before >= 0) acts.push_back({PipeOp::kSendGrad, m, c, b, before});
      } else {
        acts.push_back({act.op, m, c, b, -1});
      }
      // A buffer is free when its own backward is over and the previous part of this rank, if it is there, has read the
      // gradient of the input: of the two, whichever comes last.
      if (act.op != PipeOp::kBackwardWeight) buffers.input_done(m, c);
      if (act.op != PipeOp::kBackwardInput) buffers.all_done(m, c);
      if (act.op != PipeOp::kBackwardInput && (local_before < 0 || buffers.is_input_done(m, local_before)))
        buffers.give(m, c);
      if (act.op != PipeOp::kBackwardWeight && local_after >= 0 && buffers.is_all_done(m, local_after))
        buffers.give(m, local_after);
    }
    plan.ranks.push_back(std::move(acts));
    plan.buffers.push_back(buffers.count());
  }
  return plan;
}

}  // namespace ds::plan

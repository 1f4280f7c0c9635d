#include "plan/pipe_check.h"

#include <algorithm>

#include "base/error.h"

namespace ds::plan {
namespace {

// The progress of a micro-batch in one part, and the buffer that holds it.
struct PipeProgress {
  bool happened[kPipeOps] = {};
  int buffer = -1;

  bool has(PipeOp op) const { return happened[static_cast<int>(op)]; }
  // Its input has a gradient; all of it is over.
  bool input_grad() const { return has(PipeOp::kBackward) || has(PipeOp::kBackwardInput); }
  bool backward() const { return has(PipeOp::kBackward) || has(PipeOp::kBackwardWeight); }
};

// Reads the list of one rank.
class RankCheck {
 public:
  RankCheck(const PipePlan& plan, int rank)
      : plan_(plan),
        shape_(plan.shape),
        rank_(rank),
        progress_(static_cast<size_t>(shape_.chunks) * shape_.micro_batches),
        owners_(plan.buffers.at(rank), nullptr) {}

  void run() {
    for (step_ = 0; step_ < acts().size(); ++step_) read(acts()[step_]);
    for (int micro = 0; micro < shape_.micro_batches; ++micro)
      for (int chunk = 0; chunk < shape_.chunks; ++chunk) check_complete(micro, chunk);
  }

 private:
  const std::vector<PipeAct>& acts() const { return plan_.ranks[rank_]; }

  template <typename... Args>
  [[noreturn]] void wrong(const Args&... args) const {
    fail(ErrorKind::kValue, "pipeline schedule ", plan_.schedule, ", rank ", rank_, ", step ", step_, ", ",
         text(acts()[step_]), ": ", args...);
  }

  PipeProgress& at(int micro, int chunk) {
    return progress_[static_cast<size_t>(chunk) * shape_.micro_batches + micro];
  }
  // The same micro-batch in the neighbouring part, where that is on this rank.
  PipeProgress* local(const PipeAct& act, int step) {
    const int part = shape_.virtual_stage(rank_, act.chunk), other = part + step;
    if (other < 0 || other >= shape_.virtual_stages() || shape_.rank_of(other) != rank_) return nullptr;
    return &at(act.micro, shape_.chunk_of(other));
  }

  void read(const PipeAct& act) {
    if (act.micro < 0 || act.micro >= shape_.micro_batches)
      wrong("there are micro-batches 0 to ", shape_.micro_batches - 1);
    if (act.chunk < 0 || act.chunk >= shape_.chunks) wrong("a rank has chunks 0 to ", shape_.chunks - 1);
    const int buffers = static_cast<int>(owners_.size());
    if (act.buffer < 0 || act.buffer >= buffers) wrong("the rank has ", buffers, " buffers, numbered from 0");
    if (!plan_.trains && act.op != PipeOp::kForward && act.op != PipeOp::kSendActivation &&
        act.op != PipeOp::kRecvActivation)
      wrong("this schedule has no backward");
    PipeProgress& of = at(act.micro, act.chunk);
    if (of.has(act.op)) wrong("happens twice: each instruction stands once for each micro-batch and chunk");
    if (!computes(act.op)) check_peer(act);
    check_order(act, of);
    hold(act, of);
    of.happened[static_cast<int>(act.op)] = true;
    release(act, of);
  }

  void check_peer(const PipeAct& act) const {
    const bool forwards = act.op == PipeOp::kSendActivation || act.op == PipeOp::kRecvGrad;
    const int part = shape_.virtual_stage(rank_, act.chunk), peer = shape_.other_rank(part, forwards ? 1 : -1);
    const char* where = forwards ? " next part of the model" : " previous part of the model";
    if (peer < 0) wrong("the", where, " is on no other rank, so nothing is sent or received");
    if (act.peer != peer) wrong("the", where, " is on rank ", peer);
  }

  void check_order(const PipeAct& act, PipeProgress& of) {
    const int part = shape_.virtual_stage(rank_, act.chunk);
    const bool last = part + 1 == shape_.virtual_stages();
    PipeProgress* before = local(act, -1);
    PipeProgress* after = local(act, 1);
    switch (act.op) {
      case PipeOp::kForward:
        if (before && !before->has(PipeOp::kForward)) wrong("comes before the ForwardPass of the previous part");
        if (!before && part > 0 && !of.has(PipeOp::kRecvActivation))
          wrong("comes before the RecvActivation of its input");
        break;
      case PipeOp::kBackward:
      case PipeOp::kBackwardInput:
        if (of.input_grad()) wrong("this backward has happened already, as the other kind of backward pass");
        if (!of.has(PipeOp::kForward)) wrong("comes before its ForwardPass");
        if (after && !after->input_grad()) wrong("comes before the backward pass of the next part");
        if (!after && !last && !of.has(PipeOp::kRecvGrad)) wrong("comes before the RecvGrad of its output's gradient");
        break;
      case PipeOp::kBackwardWeight:
        if (!of.has(PipeOp::kBackwardInput)) wrong("comes before its BackwardInputPass");
        break;
      case PipeOp::kRecvActivation: break;
      case PipeOp::kSendActivation:
      case PipeOp::kRecvGrad:
        if (!of.has(PipeOp::kForward)) wrong("comes before its ForwardPass");
        if (act.op == PipeOp::kSendActivation && of.input_grad()) wrong("comes after its backward pass");
        break;
      case PipeOp::kSendGrad:
        if (!of.input_grad()) wrong("comes before its backward pass");
        break;
    }
  }

  // Takes the buffer, or finds that it is the one that was taken.
  void hold(const PipeAct& act, PipeProgress& of) {
    const bool takes =
        act.op == PipeOp::kRecvActivation || (act.op == PipeOp::kForward && !of.has(PipeOp::kRecvActivation));
    PipeProgress*& owner = owners_[act.buffer];
    if (!takes) {
      if (of.buffer != act.buffer) wrong("its micro-batch is in buffer ", of.buffer);
      return;
    }
    if (owner) wrong("buffer ", act.buffer, " still holds ", describe(owner));
    owner = &of;
    of.buffer = act.buffer;
  }

  void release(const PipeAct& act, PipeProgress& of) {
    release_if_over(act.micro, act.chunk, of);
    for (int step : {-1, 1})
      if (PipeProgress* next = local(act, step))
        release_if_over(act.micro, shape_.chunk_of(shape_.virtual_stage(rank_, act.chunk) + step), *next);
  }

  void release_if_over(int micro, int chunk, PipeProgress& of) {
    if (of.buffer < 0 || owners_[of.buffer] != &of || !over(micro, chunk, of)) return;
    owners_[of.buffer] = nullptr;
  }

  bool over(int micro, int chunk, const PipeProgress& of) {
    return missing(micro, chunk, of) < 0 && read_by_local(micro, chunk);
  }

  // Parts of the same rank that read from this one's buffer have done so.
  bool read_by_local(int micro, int chunk) {
    const PipeAct act{PipeOp::kForward, micro, chunk, 0, -1};
    PipeProgress* before = local(act, -1);
    PipeProgress* after = local(act, 1);
    if (plan_.trains) return !before || before->input_grad();
    return !after || after->has(PipeOp::kForward);
  }

  // An instruction that is still to come, or -1.
  int missing(int micro, int chunk, const PipeProgress& of) const {
    const int part = shape_.virtual_stage(rank_, chunk);
    const bool from = shape_.other_rank(part, -1) >= 0, to = shape_.other_rank(part, 1) >= 0;
    const auto lacks = [&](PipeOp op, bool wanted) { return wanted && !of.has(op) ? static_cast<int>(op) : -1; };
    for (int op :
         {lacks(PipeOp::kRecvActivation, from), lacks(PipeOp::kForward, true), lacks(PipeOp::kSendActivation, to),
          lacks(PipeOp::kRecvGrad, plan_.trains && to), lacks(PipeOp::kBackward, plan_.trains && !of.input_grad()),
          lacks(PipeOp::kBackwardWeight, plan_.trains && !of.backward()),
          lacks(PipeOp::kSendGrad, plan_.trains && from)})
      if (op >= 0) return op;
    return -1;
  }

  void check_complete(int micro, int chunk) {
    const int op = missing(micro, chunk, at(micro, chunk));
    if (op < 0) return;
    fail(ErrorKind::kValue, "pipeline schedule ", plan_.schedule, ", rank ", rank_, ", step ", acts().size(),
         " (its end): ", pipe_op_name(static_cast<PipeOp>(op)), " of micro-batch ", micro, " in chunk ", chunk,
         " never happens");
  }

  // The micro-batch that owns the buffer, and the passes for which it still needs it.
  std::string describe(const PipeProgress* of) const {
    const int index = static_cast<int>(of - progress_.data());
    const int micro = index % shape_.micro_batches, chunk = index / shape_.micro_batches;
    const int op = missing(micro, chunk, *of);
    const std::string wants =
        op < 0 ? std::string(", which another part of this rank has still to read")
               : std::string(", whose ") + pipe_op_name(static_cast<PipeOp>(op)) + " is still to come";
    return "micro-batch " + std::to_string(micro) + " of chunk " + std::to_string(chunk) + wants;
  }

  const PipePlan& plan_;
  const PipeShape& shape_;
  int rank_;
  size_t step_ = 0;
  std::vector<PipeProgress> progress_;
  std::vector<PipeProgress*> owners_;  // of each buffer
};

struct PipeMessage {
  int micro, virtual_stage;  // that made it
  size_t step;
};

// The message that a send puts into its stream, or that a recv expects.
PipeMessage message_of(const PipeShape& shape, int rank, size_t step, const PipeAct& act) {
  const int part = shape.virtual_stage(rank, act.chunk);
  const int made_by = act.op == PipeOp::kRecvActivation ? part - 1 : act.op == PipeOp::kRecvGrad ? part + 1 : part;
  return {act.micro, made_by, step};
}

// After RankCheck each send has its recv, so a stream has as many of one as of the other.
void check_streams(const PipePlan& plan) {
  std::vector<std::vector<PipeMessage>> sent(pipe_streams(plan.shape)), wanted(sent.size());
  for (int rank = 0; rank < plan.shape.stages; ++rank)
    for (size_t step = 0; step < plan.ranks[rank].size(); ++step) {
      const PipeAct& act = plan.ranks[rank][step];
      if (computes(act.op)) continue;
      auto& stream = (sends(act.op) ? sent : wanted)[pipe_stream(plan.shape, rank, act)];
      stream.push_back(message_of(plan.shape, rank, step, act));
    }
  for (int rank = 0; rank < plan.shape.stages; ++rank) {
    std::vector<size_t> next(sent.size(), 0);
    for (size_t step = 0; step < plan.ranks[rank].size(); ++step) {
      const PipeAct& act = plan.ranks[rank][step];
      if (!receives(act.op)) continue;
      const size_t stream = pipe_stream(plan.shape, rank, act), number = next[stream]++;
      const PipeMessage& want = wanted[stream][number];
      const PipeMessage& get = sent[stream].at(number);
      if (want.micro == get.micro && want.virtual_stage == get.virtual_stage) continue;
      fail(ErrorKind::kValue, "pipeline schedule ", plan.schedule, ", rank ", rank, ", step ", step, ", ", text(act),
           ": this is number ", number, " that rank ", rank, " receives from rank ", act.peer,
           " in this direction, but rank ", act.peer, " sends as number ", number, " (step ", get.step, ") ",
           text(plan.ranks[act.peer][get.step]),
           ": bring the sends of one rank and the recvs of the other into one order");
    }
  }
}

void check_deadlock(const PipePlan& plan, int send_bound) {
  const std::vector<size_t> came = pipe_walk(plan, send_bound, {});
  std::string waits;
  int first = -1;
  for (int rank = 0; rank < plan.shape.stages; ++rank) {
    if (came[rank] == plan.ranks[rank].size()) continue;
    const std::string where = "rank " + std::to_string(rank) + ", step " + std::to_string(came[rank]) + ", " +
                              text(plan.ranks[rank][came[rank]]);
    if (first < 0) first = rank;
    waits += (waits.empty() ? "" : "; ") + where;
  }
  if (first >= 0)
    fail(ErrorKind::kValue, "pipeline schedule ", plan.schedule, ": deadlock with ", send_bound,
         " messages on their way at most; these wait for each other: ", waits);
}

}  // namespace

size_t pipe_stream(const PipeShape& shape, int rank, const PipeAct& act) {
  const int from = sends(act.op) ? rank : act.peer, to = sends(act.op) ? act.peer : rank;
  const bool grad = act.op == PipeOp::kSendGrad || act.op == PipeOp::kRecvGrad;
  return (static_cast<size_t>(from) * shape.stages + to) * 2 + grad;
}

std::vector<size_t> pipe_walk(const PipePlan& plan, int send_bound, const PipeVisit& visit) {
  std::vector<size_t> next(plan.ranks.size(), 0), sent(pipe_streams(plan.shape), 0), received(sent);
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < plan.shape.stages; ++rank) {
      for (size_t& step = next[rank]; step < plan.ranks[rank].size(); ++step) {
        const PipeAct& act = plan.ranks[rank][step];
        if (!computes(act.op)) {
          const size_t stream = pipe_stream(plan.shape, rank, act);
          if (receives(act.op) ? received[stream] == sent[stream]
                               : sent[stream] - received[stream] >= static_cast<size_t>(send_bound))
            break;
          ++(receives(act.op) ? received : sent)[stream];
        }
        if (visit) visit(rank, step);
        moved = true;
      }
    }
  }
  return next;
}

void pipe_check(const PipePlan& plan, int send_bound) {
  const PipeShape& shape = plan.shape;
  shape.check();
  if (send_bound < 1) fail(ErrorKind::kValue, "a pipeline needs room for at least one message, not ", send_bound);
  if (static_cast<int>(plan.ranks.size()) != shape.stages || plan.buffers.size() != plan.ranks.size())
    fail(ErrorKind::kValue, "pipeline schedule ", plan.schedule, " has instructions for ", plan.ranks.size(),
         " ranks and numbers of buffers for ", plan.buffers.size(), ": there are ", shape.stages, " stages");
  for (int rank = 0; rank < shape.stages; ++rank) RankCheck(plan, rank).run();
  check_streams(plan);
  check_deadlock(plan, send_bound);
}

}  // namespace ds::plan

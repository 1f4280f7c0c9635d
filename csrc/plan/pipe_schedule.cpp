#include "plan/pipe_schedule.h"

#include <algorithm>
#include <deque>

#include "base/error.h"
#include "base/ranges.h"

namespace ds::plan {
namespace {

// The passes of one rank, in order.
class PipeOrder {
 public:
  explicit PipeOrder(int chunks) : next_forward_(chunks, 0), next_backward_(chunks, 0) {}

  void forward(int chunk) { add(PipeOp::kForward, next_forward_[chunk]++, chunk); }
  void backward(int chunk) { add(PipeOp::kBackward, next_backward_[chunk]++, chunk); }
  void input(int chunk) {
    waiting_.push_back({PipeOp::kBackwardWeight, next_backward_[chunk], chunk});
    add(PipeOp::kBackwardInput, next_backward_[chunk]++, chunk);
  }
  // The weights whose inputs have waited longest.
  void weight() {
    acts.push_back(waiting_.front());
    waiting_.pop_front();
  }
  void weights_left() {
    while (!waiting_.empty()) weight();
  }
  void input_and_weight(int chunk) {
    input(chunk);
    acts.push_back(waiting_.back());
    waiting_.pop_back();
  }
  // As backward() or input().
  void backward(int chunk, bool split) { split ? input(chunk) : backward(chunk); }
  void add(PipeOp op, int micro, int chunk) { acts.push_back({op, micro, chunk}); }
  int forwards(int chunk) const { return next_forward_[chunk]; }

  std::vector<PipeAct> acts;

 private:
  std::vector<int> next_forward_, next_backward_;
  std::deque<PipeAct> waiting_;
};

// p ranks, v chunks, m micro-batches.
PipeOrder gpipe(int rank, int p, int v, int m) {
  PipeOrder order(v);
  for (int i = 0; i < m; ++i) order.forward(0);
  for (int i = 0; i < m; ++i) order.backward(0);
  return order;
}

PipeOrder one_forward_one_backward(int rank, int p, int v, int m) {
  PipeOrder order(v);
  const int warm = std::min(p - 1 - rank, m);
  for (int i = 0; i < warm; ++i) order.forward(0);
  for (int i = 0; i < m; ++i) {
    if (warm + i < m) order.forward(0);
    order.backward(0);
  }
  return order;
}

// m is a multiple of p. Micro-batches go through in groups of p: a group through the first chunk, then through the
// second one, and so on; backwards the other way round.
PipeOrder interleaved(int rank, int p, int v, int m) {
  PipeOrder order(v);
  const int all = m * v, warm = std::min((v - 1) * p + 2 * (p - 1 - rank), all);
  const auto chunk_of = [&](int i) { return i / p % v; };
  for (int i = 0; i < warm; ++i) order.forward(chunk_of(i));
  for (int i = 0; i < all; ++i) {
    if (warm + i < all) order.forward(chunk_of(warm + i));
    order.backward(v - 1 - chunk_of(i));
  }
  return order;
}

// Rank r holds p - r activations in 1f1b; here it keeps r more by delaying the gradients of weights by r micro-batches.
PipeOrder zero_bubble_h1(int rank, int p, int v, int m) {
  PipeOrder order(v);
  const int warm = std::min(p - 1 - rank, m);
  for (int i = 0; i < warm; ++i) order.forward(0);
  for (int i = 0; i < m; ++i) {
    if (warm + i < m) order.forward(0);
    order.input(0);
    if (i >= rank) order.weight();
  }
  order.weights_left();
  return order;
}

// m >= 2p. Part 0 goes down the ranks, part 1 comes up again; rank p - 1 turns around.
PipeOrder zero_bubble_v(int rank, int p, int v, int m) {
  PipeOrder order(v);
  for (int i = 0; i < 2 * (p - rank) - 1; ++i) order.forward(0);
  for (int i = 0; i < rank; ++i) {
    order.forward(1);
    order.forward(0);
  }
  for (int i = 0; i < p - rank; ++i) {
    order.forward(1);
    order.input_and_weight(1);
  }
  while (order.forwards(1) < order.forwards(0) || order.forwards(0) < m) {
    if (order.forwards(0) < m) order.forward(0);
    order.input_and_weight(0);
    order.forward(1);
    order.input_and_weight(1);
  }
  for (int i = 0; i < rank; ++i) {
    order.input(0);
    order.input(1);
  }
  for (int i = 0; i < p - rank; ++i) order.input_and_weight(0);
  order.weights_left();
  return order;
}

// m >= 2p.
PipeOrder dual_pipe_v(int rank, int p, int v, int m) {
  PipeOrder order(v);
  const int later = p - 1 - rank;  // ranks further down
  for (int i = 0; i < 2 * later; ++i) order.forward(0);
  for (int i = 0; i <= rank; ++i) {
    order.forward(0);
    order.forward(1);
  }
  for (int i = 0; i < later; ++i) {
    order.input_and_weight(1);
    order.forward(1);
  }
  for (int i = 0; i < m - 2 * p + rank + 1; ++i) {
    order.forward(0);
    order.backward(1);
    order.forward(1);
    order.backward(0);
  }
  for (int i = 0; i < later; ++i) {
    order.backward(1);
    order.forward(1);
    order.backward(0);
  }
  // From the middle on gradients of inputs only: others wait for them.
  for (int i = 0; i <= rank; ++i) {
    const bool half = i > (rank + 1) / 2, turn = i == (rank + 1) / 2;
    order.backward(1, half || (turn && rank % 2 == 1));
    order.backward(0, half || turn);
  }
  for (int i = 0; i < later; ++i) {
    order.weight();
    order.input(0);
  }
  order.weights_left();
  return order;
}

PipeOrder forwards_only(int rank, int p, int v, int m) {
  PipeOrder order(v);
  for (int i = 0; i < m * v; ++i) order.forward(i / p % v);
  return order;
}

using MakeOrder = PipeOrder (*)(int, int, int, int);

struct PipeScheduleEntry {
  PipeScheduleKind kind;
  MakeOrder make;
  bool groups;  // a multiple of p micro-batches
  bool twice;   // at least 2p
};

constexpr int kAnyChunks = 1 << 20;

const std::vector<PipeScheduleEntry>& pipe_entries() {
  static const std::vector<PipeScheduleEntry> entries{
      {{"1f1b", 1, 1, true, PipePlacement::kLoop}, &one_forward_one_backward, false, false},
      {{"gpipe", 1, 1, true, PipePlacement::kLoop}, &gpipe, false, false},
      {{"interleaved", 2, kAnyChunks, true, PipePlacement::kLoop}, &interleaved, true, false},
      {{"zb-h1", 1, 1, true, PipePlacement::kLoop}, &zero_bubble_h1, false, false},
      {{"zb-v", 2, 2, true, PipePlacement::kV}, &zero_bubble_v, false, true},
      {{"dualpipe-v", 2, 2, true, PipePlacement::kV}, &dual_pipe_v, false, true},
      {{"inference", 1, kAnyChunks, false, PipePlacement::kLoop}, &forwards_only, true, false},
  };
  return entries;
}

const PipeScheduleEntry& pipe_entry(const std::string& name) {
  std::string known;
  for (const PipeScheduleEntry& entry : pipe_entries()) {
    if (entry.kind.name == name) return entry;
    known += (known.empty() ? "" : ", ") + entry.kind.name;
  }
  fail(ErrorKind::kValue, "there is no pipeline schedule \"", name, "\": there are ", known);
}

}  // namespace

const std::vector<PipeScheduleKind>& pipe_schedule_kinds() {
  static const std::vector<PipeScheduleKind> kinds = [] {
    std::vector<PipeScheduleKind> made;
    for (const PipeScheduleEntry& entry : pipe_entries()) made.push_back(entry.kind);
    return made;
  }();
  return kinds;
}


PipePlan pipe_schedule(const std::string& name, int stages, int chunks, int micro_batches, PipePlacement placement) {
  const PipeScheduleEntry& entry = pipe_entry(name);
  const PipeShape shape{stages, chunks, micro_batches, entry.kind.trains ? entry.kind.placement : placement};
  shape.check();
  if (chunks < entry.kind.min_chunks || chunks > entry.kind.max_chunks) {
    const std::string wants =
        entry.kind.max_chunks == kAnyChunks
            ? "at least " + std::to_string(entry.kind.min_chunks) + " chunks"
            : std::to_string(entry.kind.min_chunks) + (entry.kind.min_chunks == 1 ? " chunk" : " chunks");
    fail(ErrorKind::kValue, "the pipeline schedule ", name, " wants ", wants, " of layers on each rank, not ", chunks,
         ": set PipelineModule(virtual_stages=) or choose another schedule");
  }
  int padded = micro_batches;  // [Note: ragged batches]
  if (entry.groups) padded = (padded + stages - 1) / stages * stages;
  if (entry.twice) padded = std::max(padded, 2 * stages);
  std::vector<std::vector<PipeAct>> computing;
  for (int rank = 0; rank < stages; ++rank) {
    std::vector<PipeAct> acts = entry.make(rank, stages, chunks, padded).acts;
    erase_if(acts, [&](const PipeAct& act) { return act.micro >= micro_batches; });
    computing.push_back(std::move(acts));
  }
  return pipe_plan(name, shape, entry.kind.trains, computing);
}

}  // namespace ds::plan

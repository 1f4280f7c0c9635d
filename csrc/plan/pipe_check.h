// Proves that a plan of a pipeline runs, before it does.
//
// [Note: what is proven]
// On each rank, reading its list once: each forward pass, whole backward (or gradient of inputs, then of weights), send
// and recv happens exactly once, where it is wanted, after what it needs; each names the buffer that its micro-batch
// has; and no buffer is taken that something still needs. Over ranks: the k-th recv of a stream gets what the k-th send
// put in (one stream of activations and one of gradients from each rank to each other). And no rank waits forever if a
// stream takes `send_bound` messages before the next send waits for a recv. Ranks are deterministic and each stream has
// one sender and one receiver, so what can run at all runs in every timing: one walk through the lists proves it.
#pragma once
#include <cstddef>
#include <functional>
#include <vector>

#include "plan/pipe_plan.h"

namespace ds::plan {

constexpr int kPipeSendBound = 2;  // sends of one stream that may be on their way

// ErrorKind::kValue names rank, step (the index in the rank's list, from 0) and instruction of the first thing that is
// wrong.
void pipe_check(const PipePlan& plan, int send_bound = kPipeSendBound);

// Runs the lists as far as they go, in an order in which each act comes after what it waits for: recvs after their
// sends, sends after the recv that makes room. Returns how far each rank came. Streams must match (pipe_check).
using PipeVisit = std::function<void(int rank, size_t step)>;
std::vector<size_t> pipe_walk(const PipePlan& plan, int send_bound, const PipeVisit& visit);

// The stream of a send or recv, among streams() of them.
size_t pipe_stream(const PipeShape& shape, int rank, const PipeAct& act);
inline size_t pipe_streams(const PipeShape& shape) {
  return 2 * static_cast<size_t>(shape.stages) * static_cast<size_t>(shape.stages);
}

}  // namespace ds::plan

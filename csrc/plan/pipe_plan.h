// The instructions of a pipeline's ranks for one batch: a list for each of them. Integers only.
//
// The layers of a model are cut into stages x chunks consecutive parts, the *virtual stages*: 0 has the first layers.
// Each rank of the pipe (a stage) holds `chunks` of them. Micro-batch m passes all virtual stages in order, forward,
// and all in reverse, backward. The backward of a part may be one instruction or two: the gradient of its input, which
// the previous part waits for, and the gradients of its weights, which are not needed before the step.
//
// Between parts of two ranks activations and gradients are sent and received. What one rank sends to another forms two
// streams, one of activations and one of gradients; each arrives in the order in which it was sent. Parts of one rank
// hand over directly.
//
// A *buffer* holds what a rank keeps of one micro-batch in one of its parts: inputs, outputs, their gradients. It is
// taken by the first instruction of the pair (RecvActivation, else ForwardPass) and is free again after the last one
// that needs it: the whole backward, its SendGrad, and where the previous part is on the same rank, that one's
// backward, which reads the gradient from here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ds::plan {

enum class PipeOp : uint8_t {
  kForward,
  kBackward,        // both of the next two
  kBackwardInput,   // gradients of inputs
  kBackwardWeight,  // gradients of weights, later
  kSendActivation,
  kRecvActivation,
  kSendGrad,
  kRecvGrad,
};
constexpr int kPipeOps = 8;

const char* pipe_op_name(PipeOp op);            // "ForwardPass"
PipeOp pipe_op_named(const std::string& name);  // ErrorKind::kValue for a name that is none
inline bool computes(PipeOp op) { return op <= PipeOp::kBackwardWeight; }
inline bool sends(PipeOp op) { return op == PipeOp::kSendActivation || op == PipeOp::kSendGrad; }
inline bool receives(PipeOp op) { return op == PipeOp::kRecvActivation || op == PipeOp::kRecvGrad; }

struct PipeAct {
  PipeOp op = PipeOp::kForward;
  int micro = 0;
  int chunk = 0;   // of this rank
  int buffer = 0;  // of this rank
  int peer = -1;   // send, recv: the other rank of the pipe

  bool operator==(const PipeAct& other) const;
};

// "SendActivation(micro 3, chunk 0, buffer 1, to rank 2)"
std::string text(const PipeAct& act);

// On which rank a virtual stage is: ranks 0, 1, 2, 0, 1, 2 (kLoop), or down and up again, 0, 1, 2, 2, 1, 0 (kV).
enum class PipePlacement : uint8_t { kLoop, kV };

struct PipeShape {
  int stages = 1;
  int chunks = 1;
  int micro_batches = 1;
  PipePlacement placement = PipePlacement::kLoop;

  int virtual_stages() const { return stages * chunks; }
  int virtual_stage(int rank, int chunk) const {
    return chunk * stages + (placement == PipePlacement::kV && chunk % 2 == 1 ? stages - 1 - rank : rank);
  }
  int chunk_of(int virtual_stage) const { return virtual_stage / stages; }
  int rank_of(int virtual_stage) const {
    const int column = virtual_stage % stages;
    return placement == PipePlacement::kV && chunk_of(virtual_stage) % 2 == 1 ? stages - 1 - column : column;
  }
  // The rank that a part's neighbour in the model is on, where that is another one; else -1. step: -1 or 1.
  int other_rank(int virtual_stage, int step) const;
  void check() const;  // ErrorKind::kValue where a count is below one
};

struct PipePlan {
  std::string schedule;  // its name, or what a client's is called
  PipeShape shape;
  bool trains = true;                       // false: forward passes only
  std::vector<std::vector<PipeAct>> ranks;  // instructions of each
  std::vector<int> buffers;                 // how many each rank needs
};

// The acts of each rank that compute, in order, become a plan: each is preceded by the recv of what it needs and
// followed by the send of what it made, and buffers are given out, the lowest free one first. `buffer` and `peer` of
// `computing` are not looked at.
PipePlan pipe_plan(const std::string& schedule, const PipeShape& shape, bool trains,
                   const std::vector<std::vector<PipeAct>>& computing);

}  // namespace ds::plan

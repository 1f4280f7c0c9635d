// A Communicator over a torch process group (gloo, nccl, mpi, hccl, ...).
#pragma once
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/communicator.h"
#include "comm/watch.h"

namespace ds::comm {

// Keeps the group alive. Element types that the backend cannot carry (bf16 and bool on Debian's gloo) travel as fp32
// or uint8; the result is rounded once.
// `blocking_region`: how to wait for the end of the group, whose threads may need what the caller holds; null: nothing
// is held.
CommunicatorPtr c10d_communicator(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                  BlockingRegion blocking_region = nullptr);

}  // namespace ds::comm

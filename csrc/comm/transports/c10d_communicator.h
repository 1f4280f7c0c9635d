// A Communicator over a torch process group (gloo, nccl, mpi, hccl, ...).
#pragma once
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/communicator.h"

namespace ds::comm {

// The way in which gloo runs verbs for which it has no collective, or a slow one.
enum class GlooBy {
  kTransfers,    // sends and receives between all pairs: fastest; their handles have to be waited for
  kCollectives,  // its own collectives, which run in threads of gloo: handles can be asked and dropped, as scripts may
  kNothing,      // tensors are on a device whose backend carries them, also where the group has gloo for host memory
};

// Keeps the group alive. Element types that the backend cannot carry (bf16 and bool on Debian's gloo) travel as fp32,
// uint8 or bytes; the result is rounded once.
// `gloo_by`: kCollectives says, too, that gloo carries its tensors in host memory.
CommunicatorPtr c10d_communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, GlooBy gloo_by = GlooBy::kTransfers);

}  // namespace ds::comm

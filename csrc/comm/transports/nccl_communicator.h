// A Communicator over NCCL called directly: tensors of one kind of device, each call on a stream of its own beside the
// current one, so that it overlaps with what is computed meanwhile.
#pragma once
#include <c10/core/Stream.h>

#include "comm/communicator.h"
#include "comm/nccl/nccl_comm.h"

namespace ds::comm {

// `host`: carries tensors in host memory, and what needs them (peer memory, among(), barriers); it has the same ranks.
// Sums are formed as NCCL forms them: not in rank order, and of 16-bit floats rounded in each step. run_all() takes
// every verb that NCCL has.
CommunicatorPtr nccl_communicator(NcclCommPtr nccl, CommunicatorPtr host);

// Every tensor goes through NCCL: for tensors of one device only, or for tests, whose NCCL works on host memory.
CommunicatorPtr nccl_communicator_alone(NcclCommPtr nccl);

}  // namespace ds::comm

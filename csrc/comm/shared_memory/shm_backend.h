// The same collectives as a backend of torch.distributed, so that plain torch calls and DistributedDataParallel use
// them.
#pragma once
#include "comm/c10d_compat.h"
#include "comm/boards/watch.h"

namespace ds::comm {

using BackendPtr = c10::intrusive_ptr<compat::BackendBase>;

// Collective over the ranks of `store`. What shared memory does not carry goes through `other`, gloo as a rule: send
// and receive, sparse tensors, tensors of other devices, and everything where the ranks do not share a host. Null: such
// calls are refused.
BackendPtr shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, BackendPtr other, const GroupFacts& facts = {});

// False where the ranks of a shm_backend do not share a host, and for other backends.
bool shares_memory(const BackendPtr& backend);

}  // namespace ds::comm

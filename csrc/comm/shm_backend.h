// The same collectives as a backend of torch.distributed, so that plain torch calls and DistributedDataParallel use
// them.
#pragma once
#include "comm/c10d_compat.h"
#include "comm/watch.h"

namespace ds::comm {

using BackendPtr = c10::intrusive_ptr<compat::BackendBase>;

// Collective over the ranks of `store`. What shared memory does not carry goes through `other`, gloo as a rule: send
// and receive, sparse tensors, tensors of other devices, and everything where the ranks do not share a host.
BackendPtr shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, BackendPtr other, const GroupFacts& facts = {});

}  // namespace ds::comm

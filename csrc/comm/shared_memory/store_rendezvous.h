// Ranks that share only a store of torch find out here whether they share a host, and meet in its memory.
#pragma once
#include "comm/c10d_compat.h"
#include "comm/shared_memory/shared_segments.h"

namespace ds::comm {

// Collective. Whether all ranks are on one host.
bool on_one_host(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

Rendezvous rendezvous_over_store(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

}  // namespace ds::comm

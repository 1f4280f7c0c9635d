// How ranks that have nothing but a store of torch in common find out whether they share a host, and meet there.
#pragma once
#include "comm/c10d_compat.h"
#include "comm/shared_segments.h"

namespace ds::comm {

// Collective. Whether all ranks are on one host.
bool on_one_host(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

Rendezvous rendezvous_over_store(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

}  // namespace ds::comm

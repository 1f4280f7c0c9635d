// Peer memory between processes of one host: anonymous files (memfd) that the others map through /proc.
#pragma once
#include <functional>

#include "base/clock.h"
#include "comm/communicator.h"
#include "comm/shared_memory/peer_memory.h"
#include "comm/segments/shared_segments.h"

namespace ds::comm {

// Introduces ranks to each other over a group that exists; for use while `group` does.
Rendezvous rendezvous_over(Communicator& group);

// Every rank of `group` calls it with the same `bytes`. Null on every rank where it is impossible for one: ranks on
// several hosts or in several PID namespaces, or /proc entries that may not be opened. A caller that waits for a rank
// calls `look_after` several times a second, with the time since when; it throws when there is nothing to wait for.
using LookAfter = std::function<void(int rank, Clock::time_point since)>;
PeerMemoryPtr process_peer_memory(Communicator& group, int64_t bytes, LookAfter look_after = nullptr);

}  // namespace ds::comm

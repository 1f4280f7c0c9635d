// Peer memory between processes of one host: anonymous files (memfd) that the others map through /proc.
#pragma once
#include "comm/communicator.h"
#include "comm/peer_memory.h"
#include "comm/shared_segments.h"

namespace ds::comm {

// Introduces ranks to each other over a group that exists; for use while `group` does.
Introduction introduction_over(Communicator& group);

// Every rank of `group` calls it with the same `bytes`. Null on every rank where it is impossible for one: ranks on
// several hosts or in several PID namespaces, or /proc entries that may not be opened.
PeerMemoryPtr process_peer_memory(Communicator& group, int64_t bytes);

}  // namespace ds::comm

// Ranks are threads of one process: the communicator of the C++ tests. Slow, obvious and deterministic; CPU tensors.
#pragma once
#include <vector>

#include "comm/communicator.h"

namespace ds::comm {

// One communicator per rank, all of one group. Each must be used by one thread at a time; ranks must be different
// threads, because a collective blocks until every rank has joined it. A rank that joins with another collective or
// another size makes every rank fail with a message that names both. Destroying one rank's communicator before the
// others are done makes their pending collectives fail instead of hanging. Without `peer_memory` they behave like ranks
// on different hosts.
std::vector<CommunicatorPtr> thread_communicators(int size, bool peer_memory = true);

}  // namespace ds::comm

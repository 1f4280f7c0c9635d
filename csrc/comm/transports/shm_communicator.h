// A Communicator through shared memory, for ranks of one host; see shm_group.h.
#pragma once

#include "base/clock.h"
#include "comm/communicator.h"
#include "comm/boards/watch.h"

namespace ds::comm {

// Collective over `inner`, whose ranks it serves: tensors in host memory go through shared memory, all others and
// whatever else there is through `inner`. Ranks on several hosts meet through their leaders
// (hierarchical_communicator.h). Returns `inner` itself where no two ranks share a host, or where DS_SHM_COLLECTIVES=0
// in the environment. `timeout`: how long a rank waits for another before all give up.
CommunicatorPtr shm_communicator(CommunicatorPtr inner, milliseconds timeout, const GroupFacts& facts = {});
// The same where all ranks share a host, and `inner` itself elsewhere.
CommunicatorPtr one_host_communicator(CommunicatorPtr inner, milliseconds timeout, const GroupFacts& facts = {});
// And for several hosts of which one has several ranks: all_to_all goes by hosts, all else through `inner`. `inner`
// itself elsewhere.
CommunicatorPtr exchanges_by_hosts(CommunicatorPtr inner, milliseconds timeout, const GroupFacts& facts = {});

}  // namespace ds::comm

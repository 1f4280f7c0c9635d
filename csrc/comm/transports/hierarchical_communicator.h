// A Communicator for ranks on several hosts: shared memory inside each host, and between the hosts' leaders what
// carries the group.
//
// [Note: leaders]
// The lowest rank of a host leads it. A reduction is formed inside each host in rank order, then between the leaders in
// the order of their hosts, in fp32 where the elements are 16-bit floats, and rounded once: the same bits on every
// rank. Before leaders exchange data they compare what they call, while their hosts are busy with their own part: two
// hosts that are at different collectives stop with a message instead of mixing them up. Of an all_to_all, even or
// uneven, one message with rows goes from each host to each other one (host_exchange.h), and the same bits arrive.
#pragma once

#include "base/clock.h"
#include "comm/communicator.h"
#include "comm/boards/watch.h"

namespace ds::comm {

// The verbs that go through leaders: all verbs that they speed up, or all_to_all alone. The latter is for calls of a
// script, which may end at any time; a script's reductions are those of `inner`, and so is the communicator's name.
enum class ByHosts { kAll, kExchanges };

// Collective over `inner`. `host`: where this rank is, see host_id(). Null on all ranks where all are on one host or
// each is on its own, where some host has no shared memory for its ranks, or where `inner` has no groups of
// leaders.
CommunicatorPtr hierarchical_communicator(const CommunicatorPtr& inner, milliseconds timeout, const GroupFacts& facts,
                                          int64_t host, ByHosts what = ByHosts::kAll);

// host_id() of every rank, by rank. Collective.
std::vector<int64_t> hosts_of_all(Communicator& group, int64_t host);

}  // namespace ds::comm

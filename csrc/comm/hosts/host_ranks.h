// The ranks of a communicator by host, with communicators among some of them.
#pragma once
#include "comm/communicator.h"
#include "comm/hosts/hosts.h"

namespace ds::comm {

// `inner`: the ranks of this host. `outer`: on each host, the rank with the same place there. Both are null unless
// there are several hosts with equally many ranks each, and more than one.
struct HostRanks {
  Hosts hosts;  // of the ranks of the communicator
  CommunicatorPtr inner, outer;

  bool is_grid() const { return inner != nullptr; }
  // Whether every rank has a host of its own.
  bool apart() const {
    for (const std::vector<int>& host : hosts.ranks)
      if (host.size() != 1) return false;
    return hosts.ranks.size() > 1;
  }
};

}  // namespace ds::comm

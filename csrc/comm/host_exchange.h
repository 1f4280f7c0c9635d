// One all_to_all among ranks on several hosts, carried by the hosts' leaders.
//
// [Note: one message for each pair of hosts]
// From rank to rank, the ranks of a host with m of them would send m x n messages to one with n. Instead they copy what
// is for other hosts into the memory of their leader, through shared memory; of that, all that is for one host lies
// together: giver by giver, and of each giver taker by taker. It goes to that host's leader as one message, and from
// its memory the ranks there copy their rows to where they belong. How long a message is follows from what the ranks of
// the taking host take: nobody sends counts along. What stays on a host goes through its shared memory meanwhile.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/hosts.h"
#include "comm/record.h"
#include "comm/shm_group.h"
#include "comm/strided_parts.h"

namespace ds::comm {

// Host memory that is kept between calls and grows with the largest.
class KeptMemory {
 public:
  at::Tensor of(int64_t numel, at::ScalarType type);

 private:
  at::Tensor bytes_;
};

// What a leader keeps for its exchanges.
struct LeaderMemory {
  KeptMemory outgoing, incoming;
};

// The steps of one call, in this order: all ranks of a host take part in those that have a ShmGroup, the leader alone
// in the others.
class HostExchange {
 public:
  // `op`: a kAllToAll of host memory, which lives as long as this. `memory` is used where this rank leads.
  HostExchange(const Op& op, const Hosts& hosts, LeaderMemory& memory);

  // What is for other hosts comes to the leader.
  void collect(ShmGroup& group);
  // What a leader tells the others. By host: elements that the ranks of this one give to those of that one, then what
  // they take from them; and checksums of what each rank of this host gives to each of the group, and takes.
  std::vector<int64_t> told() const;
  static size_t numbers(const Hosts& hosts) { return 2 * hosts.ranks.size() + 2; }
  // `all`: told() of all hosts. Fails where they do not fit.
  void check(const std::vector<std::vector<int64_t>>& all) const;
  // A message to each other host that gets something, and one from each that gives something.
  WorkPtr cross(Communicator& leaders) const;
  // What stays on the host.
  void inside(ShmGroup& group) const;
  // What has come from other hosts.
  void deliver(ShmGroup& group) const;

 private:
  using Views = StridedParts::Views;

  template <typename Visit>
  void over_others(const Visit& visit) const;  // visit(number of the host, its ranks), in the order of the hosts
  int64_t given(size_t place, int to) const { return counts_[place * 2 * n_ + static_cast<size_t>(to)]; }
  int64_t taken(size_t place, int from) const { return counts_[(place * 2 + 1) * n_ + static_cast<size_t>(from)]; }
  void gather_counts(ShmGroup& group);
  void move(ShmGroup& group, Views give, Views take) const;
  int64_t all_of(size_t first) const;  // the sum of totals_ of all hosts from there on

  const Hosts& hosts_;
  LeaderMemory& memory_;
  const at::ScalarType type_;
  const std::string tag_;
  Views give_, take_;  // by rank of the group
  const size_t n_;
  // Of a leader:
  std::vector<int64_t> counts_;  // for each rank of the host what it gives to all ranks and what it takes from them
  std::vector<int64_t> totals_;
  at::Tensor outgoing_, incoming_;  // host after host
};

}  // namespace ds::comm

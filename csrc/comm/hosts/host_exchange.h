// One all_to_all among ranks on several hosts; the leaders of the hosts exchange the messages.
//
// [Note: one message for each pair of hosts]
// Sent from rank to rank, the rows of a host with m ranks for one with n would be m x n messages. Instead ranks copy
// rows for other hosts into the memory of their leader, through shared memory. Rows for one host are contiguous there:
// sender by sender, and for each sender receiver by receiver. The leader sends them to that host's leader as one
// message, and the ranks there copy their rows out of its memory. The length of a message follows from counts of the
// receiving ranks, so no counts are sent. Meanwhile rows for ranks of the same host go through its shared memory.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/hosts/hosts.h"
#include "comm/boards/record.h"
#include "comm/shared_memory/shm_group.h"
#include "comm/calls/strided_parts.h"

namespace ds::comm {

// Host memory that is kept between calls and grows to the size of the largest one.
class KeptMemory {
 public:
  at::Tensor of(int64_t numel, at::ScalarType type);

 private:
  at::Tensor bytes_;
};

// Memory that a leader keeps for its exchanges.
struct LeaderMemory {
  KeptMemory outgoing, incoming;
};

// The steps of one call, in this order: all ranks of a host take part in those that have a ShmGroup, the leader alone
// in the others.
class HostExchange {
 public:
  // `op`: a kAllToAll of host memory, which lives as long as this. `memory` is used where this rank leads.
  HostExchange(const Op& op, const Hosts& hosts, LeaderMemory& memory);

  // Copies rows for other hosts into the memory of the leader.
  void collect(ShmGroup& group);
  // The numbers that a leader sends to the others: for each host the elements that ranks of this host send to it, then
  // for each host the elements that they receive from it, and two checksums of the counts of single ranks.
  std::vector<int64_t> told() const;
  static size_t numbers(const Hosts& hosts) { return 2 * hosts.ranks.size() + 2; }
  // `all`: told() of all hosts. Fails where the counts of two hosts differ.
  void check(const std::vector<std::vector<int64_t>>& all) const;
  // Exchanges one message with each other host: none is sent where there are no elements for it.
  WorkPtr cross(Communicator& leaders) const;
  // Exchanges rows among ranks of this host.
  void inside(ShmGroup& group) const;
  // Copies rows of other hosts out of the memory of the leader.
  void deliver(ShmGroup& group) const;

 private:
  using Views = StridedParts::Views;

  template <typename Visit>
  void over_others(const Visit& visit) const;  // visit(number of the host, its ranks), in the order of the hosts
  int64_t given(size_t local, int to) const { return counts_[local * 2 * n_ + static_cast<size_t>(to)]; }
  int64_t taken(size_t local, int from) const { return counts_[(local * 2 + 1) * n_ + static_cast<size_t>(from)]; }
  void gather_counts(ShmGroup& group);
  void move(ShmGroup& group, Views give, Views take) const;
  int64_t all_of(size_t first) const;  // the sum of totals_ of all hosts from there on

  const Hosts& hosts_;
  LeaderMemory& memory_;
  const at::ScalarType type_;
  const std::string tag_;
  Views give_, take_;  // by rank of the group
  const size_t n_;
  // State of a leader:
  std::vector<int64_t> counts_;  // for each rank of the host what it gives to all ranks and what it takes from them
  std::vector<int64_t> totals_;
  at::Tensor outgoing_, incoming_;  // host after host
};

}  // namespace ds::comm

// The ranks over which the elements of a space are spread.
#pragma once
#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "comm/hosts/host_ranks.h"
#include "plan/spaces/space_rule.h"

namespace ds::zero {

// Ranks over which a sum of squares is added up: they hold other elements.
struct NormRanks {
  comm::CommunicatorPtr ranks;
  bool first = true;  // false: an earlier one of these ranks holds the same elements, and counts them
};

// A reduction is a reduce-scatter over `shard`, then an all-reduce over `replicas`, each where it has more than one
// rank. Neither is null; a group of one stands for no other ranks.
struct SpaceRanks {
  comm::CommunicatorPtr shard;     // each element has one owner among these ranks
  comm::CommunicatorPtr replicas;  // these hold the same shard: all data-parallel ranks at stage 0, MiCS, experts
  // The sum of squares of what this rank owns is added up over these, one after the other: `shard`, then the ranks with
  // other elements of the same layers (experts: the expert-parallel ranks), last those with other layers.
  std::vector<NormRanks> norm_over;
  plan::SpaceAxes axes{};  // what the rule has answered
  // Opens the communicator of the ranks along some axes of the mesh for a purpose; all of these ranks call it. For a
  // way to reduce or a source that exchanges over more than the above.
  std::function<comm::CommunicatorPtr(const plan::Axes&, plan::Purpose)> open{};
  // Returns the ranks of `shard` by host, and opens communicators among them at the first call; all of them call it.
  std::function<const comm::HostRanks&()> by_host{};

  bool alone() const { return shard->size() == 1 && replicas->size() == 1; }
  // This rank, for messages.
  int rank() const { return shard->size() > 1 ? shard->rank() : replicas->rank(); }
};

// The same group, or both of one rank.
inline bool same_ranks(const comm::CommunicatorPtr& a, const comm::CommunicatorPtr& b) {
  return a == b || (a->size() == 1 && b->size() == 1);
}

inline bool operator==(const NormRanks& a, const NormRanks& b) {
  return same_ranks(a.ranks, b.ranks) && a.first == b.first;
}

// Both reduce over the same ranks.
inline bool reduce_alike(const SpaceRanks& a, const SpaceRanks& b) {
  return same_ranks(a.shard, b.shard) && same_ranks(a.replicas, b.replicas) && a.axes.way == b.axes.way;
}

inline bool operator==(const SpaceRanks& a, const SpaceRanks& b) {
  return reduce_alike(a, b) && a.norm_over == b.norm_over;
}

}  // namespace ds::zero

// The ranks of a group by host.
#pragma once
#include <cstdint>
#include <vector>

namespace ds::comm {

struct Hosts {
  std::vector<std::vector<int>> ranks;  // of each host, ascending; hosts by their lowest rank
  int mine = 0;                         // the host of this rank
  int local = 0;                        // this rank's index in it

  bool leads() const { return local == 0; }
  std::vector<int> leaders() const;
  // The host of a rank, and its index there.
  int host_of(int rank) const;
  int local_rank_of(int rank) const;
};

Hosts group_by_host(const std::vector<int64_t>& host_of_rank, int rank);

}  // namespace ds::comm

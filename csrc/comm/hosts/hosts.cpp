#include "comm/hosts/hosts.h"

#include <algorithm>
#include <map>

namespace ds::comm {

std::vector<int> Hosts::leaders() const {
  std::vector<int> found;
  for (const auto& host : ranks) found.push_back(host.front());
  return found;
}

int Hosts::host_of(int rank) const {
  for (size_t host = 0; host < ranks.size(); ++host)
    if (std::binary_search(ranks[host].begin(), ranks[host].end(), rank)) return static_cast<int>(host);
  return -1;
}

int Hosts::local_rank_of(int rank) const {
  const auto& host = ranks[host_of(rank)];
  return static_cast<int>(std::lower_bound(host.begin(), host.end(), rank) - host.begin());
}

Hosts group_by_host(const std::vector<int64_t>& host_of_rank, int rank) {
  Hosts made;
  std::map<int64_t, size_t> known;
  for (size_t r = 0; r < host_of_rank.size(); ++r) {
    const auto [found, fresh] = known.emplace(host_of_rank[r], made.ranks.size());
    if (fresh) made.ranks.emplace_back();
    made.ranks[found->second].push_back(static_cast<int>(r));
  }
  made.mine = made.host_of(rank);
  made.local = made.local_rank_of(rank);
  return made;
}

}  // namespace ds::comm

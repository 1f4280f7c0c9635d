#include "base/numa.h"

#include <sched.h>

#include <fstream>
#include <sstream>

namespace ds {
namespace {

// "0-2,5" is 0, 1, 2, 5. What is not a list is an empty one.
std::vector<int> numbers_in(const std::string& path) {
  std::ifstream file(path);
  std::string text, part;
  std::getline(file, text);
  std::istringstream parts(text);
  std::vector<int> found;
  while (std::getline(parts, part, ',')) {
    int first = 0, last = 0;
    char dash = 0;
    std::istringstream range(part);
    if (!(range >> first)) continue;
    if (!(range >> dash >> last)) last = first;
    for (int i = first; i <= last; ++i) found.push_back(i);
  }
  return found;
}

}  // namespace

std::vector<Processors> usable_nodes(const std::string& root) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return {};  // more processors than the set has room for
  std::vector<Processors> nodes;
  for (int node : numbers_in(root + "/online")) {
    Processors usable;
    for (int cpu : numbers_in(root + "/node" + std::to_string(node) + "/cpulist"))
      if (cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed)) usable.push_back(cpu);
    if (!usable.empty()) nodes.push_back(usable);
  }
  return nodes;
}

std::vector<size_t> spread_over(const std::vector<Processors>& nodes, int threads) {
  size_t processors = 0;
  for (const Processors& node : nodes) processors += node.size();
  std::vector<size_t> result(threads, 0);
  for (int i = 0; i < threads && nodes.size() > 1; ++i) {
    size_t before = processors * i / threads;
    while (before >= nodes[result[i]].size()) before -= nodes[result[i]++].size();
  }
  return result;
}

std::vector<std::vector<int>> helping_orders(const std::vector<size_t>& node) {
  const int threads = static_cast<int>(node.size());
  std::vector<std::vector<int>> orders(threads);
  for (int self = 0; self < threads; ++self)
    for (bool near : {true, false})
      for (int k = 0; k < threads; ++k)
        if (const int other = (self + k) % threads; (node[other] == node[self]) == near) orders[self].push_back(other);
  return orders;
}

void stay_on(const Processors& processors) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : processors) CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
}

}  // namespace ds

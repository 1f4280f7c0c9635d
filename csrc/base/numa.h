// Processors by memory node.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace ds {

using Processors = std::vector<int>;

// The processors of each memory node that this process may run on, in the order of the nodes; nodes without any are
// left out. One entry or none where the machine has one node, or does not say. `root` is for tests.
std::vector<Processors> usable_nodes(const std::string& root = "/sys/devices/system/node");

// The node of each of `threads` threads: in order, and in proportion to the processors of the nodes. All 0 for less
// than two nodes.
std::vector<size_t> spread_over(const std::vector<Processors>& nodes, int threads);

// For each thread, given the nodes of all: itself, the others of its node, all others, each time from the next one on.
std::vector<std::vector<int>> helping_orders(const std::vector<size_t>& node);

// Keeps the calling thread on these processors. Without effect where the system refuses: it is a matter of speed only.
void stay_on(const Processors& processors);

}  // namespace ds

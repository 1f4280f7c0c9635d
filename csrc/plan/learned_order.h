// The order of a program that runs again and again, and leaves out other entries each time.
//
// [Note: entries that are left out]
// With progressive layer dropping, each step leaves out other layers, and all ranks know which. An entry keeps its
// place in the order while it is left out. An entry that no run has had up to now gets its place from the first run
// that has it. A run that has another order, or entries that the order lacks for no such reason, contradicts the order.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

namespace ds::plan {

struct LearnedOrder {
  using Numbers = std::vector<int32_t>;  // ascending
  std::vector<Numbers> entries;
  Numbers unseen;  // every run has left them out, so the entries do not have them; of one run: what it has left out
};

// The order of both; nothing where they contradict each other. `shrinks`: entries that the run lacks are dropped,
// though it has not left them out; else they contradict it.
std::optional<LearnedOrder> merged(const LearnedOrder& order, const LearnedOrder& run, bool shrinks = false);

LearnedOrder::Numbers common(const LearnedOrder::Numbers& some, const LearnedOrder::Numbers& others);
LearnedOrder::Numbers without(const LearnedOrder::Numbers& some, const LearnedOrder::Numbers& others);

}  // namespace ds::plan

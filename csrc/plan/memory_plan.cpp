#include "plan/memory_plan.h"

#include <algorithm>

#include "base/error.h"
#include "base/sizes.h"

namespace ds::plan {

namespace {

constexpr const char* kTooMany = "bytes of the states (check the number of parameters)";
constexpr int64_t kHalfBytes = 2;                              // a 16-bit parameter, or its gradient
constexpr int64_t kFullBytes = 4;                              // an fp32 parameter, or its gradient
constexpr int64_t kAdamBytes = 12;                             // fp32 master weight and two moments
constexpr int64_t kStepBytes = kAdamBytes + kFullBytes;        // with the fp32 gradient the step reads
constexpr int64_t kEverythingBytes = kStepBytes + kHalfBytes;  // with the 16-bit parameter

int64_t times(int64_t a, int64_t b) { return sizes::product(kTooMany, a, b); }
int64_t plus(int64_t a, int64_t b) { return sizes::sum(kTooMany, a, b); }

void at_least(int64_t value, int64_t least, const char* what) {
  if (value < least) fail(ErrorKind::kValue, what, " must be at least ", least, ", got ", value, ".");
}

int64_t ranks_of(const Node& node) {
  at_least(node.ranks, 1, "The number of ranks per node");
  at_least(node.nodes, 1, "The number of nodes");
  return times(node.ranks, node.nodes);
}

}  // namespace

int64_t moved_bucket_limit(int64_t numel) {
  constexpr int64_t kSmallest = 1 << 20, kBuckets = 16;  // smaller ones are slow on a drive
  return std::max(kSmallest, numel / kBuckets);
}

MemoryNeed zero2_need(int64_t numel, const Node& node, bool offload_optimizer) {
  at_least(numel, 0, "The number of parameters");
  const int64_t world = ranks_of(node);
  if (offload_optimizer) {
    return {times(numel, std::max(times(kFullBytes, world), kStepBytes)), times(numel, kHalfBytes)};
  }
  const int64_t device = plus(times(numel, 2 * kHalfBytes), times(numel, kStepBytes) / world);
  return {times(numel, times(kFullBytes, node.ranks)), device};
}

MemoryNeed zero3_need(int64_t numel, int64_t largest_layer_numel, const Node& node, const Zero3Options& options) {
  at_least(numel, 0, "The number of parameters");
  at_least(largest_layer_numel, 0, "The number of parameters of the largest layer");
  const int64_t world = ranks_of(node);
  if (options.offload_params && !options.offload_optimizer) {
    fail(ErrorKind::kValue,
         "Parameters are offloaded to the host only together with the optimizer: offload the optimizer, too, or "
         "neither.");
  }
  const int64_t layer = times(largest_layer_numel, 2 * kHalfBytes);
  const int64_t copies = times(kFullBytes, node.ranks);  // a whole fp32 model per rank, for a moment
  if (!options.offload_optimizer) {
    const int64_t device = plus(layer, times(numel, kEverythingBytes) / world);
    return {times(options.sharded_init ? largest_layer_numel : numel, copies), device};
  }
  const int64_t width = options.offload_params ? kEverythingBytes : kStepBytes;
  const int64_t kept = times(numel, width) / node.nodes;
  const int64_t host = options.sharded_init ? kept : std::max(times(numel, copies), kept);
  return {host, options.offload_params ? layer : plus(layer, times(numel, kHalfBytes) / world)};
}

}  // namespace ds::plan

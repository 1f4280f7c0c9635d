// Batch sizes that stay the same for many numbers of ranks: the section "elasticity" of the configuration as integers.
#pragma once
#include <cstdint>
#include <vector>

namespace ds::plan {

struct ElasticRequest {
  int64_t max_batch;            // samples per optimizer step, at most
  std::vector<int64_t> micros;  // samples per rank and forward to choose from, in the user's order
  int64_t min_ranks, max_ranks;
  bool prefer_larger;  // of equally good batches, and of micro sizes
};

struct ElasticPlan {
  int64_t batch;                // 0: no batch fits
  std::vector<int64_t> worlds;  // numbers of ranks that the batch can be cut for, ascending
};

// The largest highly composite number (more divisors than any smaller number) that is at most `limit`; 0 below 1.
int64_t highly_composite(int64_t limit);

// The numbers of ranks from `low` to `high` among which `batch` can be cut with one of `micros`, ascending.
std::vector<int64_t> elastic_worlds(int64_t batch, const std::vector<int64_t>& micros, int64_t low, int64_t high);

// Version 0.1. A candidate is each micro size, and their least common multiple, times the largest highly composite
// number that keeps it within max_batch; a common multiple above max_batch is no candidate, so no batch is above
// max_batch. The one with the most worlds is taken; of several the largest (prefer_larger) or the smallest.
// Throws Error(kValue) when a micro size is larger than max_batch.
ElasticPlan elastic_plan(const ElasticRequest& request);

// The micro size with which `ranks` process `batch`: the largest that divides each rank's part, else (larger false) the
// first. 0: none.
int64_t elastic_micro(int64_t batch, int64_t ranks, const std::vector<int64_t>& micros, bool larger);

struct ElasticNodes {
  int64_t ranks_per_node, model_parallel;
};

// Version 0.2: whole nodes are added and removed, model_parallel ranks share one copy of the model; worlds are numbers
// of data-parallel ranks. Throws Error(kValue) when a node does not hold whole copies of the model.
ElasticPlan elastic_nodes(const ElasticRequest& request, const ElasticNodes& nodes);

struct ElasticNodePlan {
  int64_t batch;                // 0: no batch fits
  std::vector<int64_t> worlds;  // data-parallel ranks
  int64_t micro;                // 0: none
  bool listed;  // false: the ranks at hand are in no world of the batch for all; this one is theirs alone
};

// The same for `ranks`, which get the batch that is nearest to max_batch for them when they are outside the list.
// Throws Error(kValue) when a node does not hold whole copies of the model or `ranks` are not whole nodes.
ElasticNodePlan elastic_node_plan(const ElasticRequest& request, const ElasticNodes& nodes, int64_t ranks);

}  // namespace ds::plan

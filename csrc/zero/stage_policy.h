// A ZeRO stage is a row of this table, not a class: the engine is assembled from the answers.
#pragma once

namespace ds::zero {

enum class ReduceWhen { kBoundary, kEveryMicroStep };

struct StagePolicy {
  int stage;
  bool shard_states;  // fp32 master weights and optimizer states
  bool shard_grads;
  bool shard_params;
  ReduceWhen reduce_when;
};

// Fails for a stage whose row is not built yet, naming it.
const StagePolicy& stage_policy(int stage);

}  // namespace ds::zero

// The decisions of a ZeRO stage. Only this file knows stage numbers: the engine is assembled from the answers, and
// Python reads them (`deepspeed._native._C.stage_policy`).
#pragma once

namespace ds::zero {

// kWhole: every data-parallel rank holds all of it. kShard: every rank holds its shard of it.
enum class Cut { kWhole, kShard };

// kFlat: parameters end to end in one buffer, which is cut regardless of where one ends. kPerParam: each parameter is
// cut by itself.
enum class Layout { kFlat, kPerParam };

// The time at which gradients are summed over the ranks: at the end of a step's last micro-step, or of every one.
enum class ReduceAt { kBoundary, kMicroStep };

// The time at which the parameters that the model computes with are gathered from their shards.
enum class GatherAt { kNever, kAfterStep, kOnUse };

// The files of a checkpoint in the published layout.
struct SavedForm {
  bool model_by_rank;      // a model file of each data-parallel rank, with its slices; else one, of whole parameters
  bool optimizer_by_rank;  // an optimizer file of each rank, beside the names and shapes that put them together
  bool frozen_listed;      // model files list the parameters that are not trained
};

struct StagePolicy {
  int stage;
  Cut lp, grad, master;  // parameters that the model computes with, gradients, fp32 masters and optimizer states
  Layout layout;
  ReduceAt reduce;
  GatherAt gather;
  bool grads_on_params;  // between backward and step gradients are in `.grad`
  SavedForm saved;

  bool shards_params() const { return lp == Cut::kShard; }
  bool shards_grads() const { return grad == Cut::kShard; }
  bool shards_states() const { return master == Cut::kShard; }
};

// Fails for a stage that does not exist, naming it.
const StagePolicy& stage_policy(int stage);

}  // namespace ds::zero

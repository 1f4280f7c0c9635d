// The options of an engine, from the resolved configuration and the facts of this run. The only file that reads a key
// for the engine: a new one costs its Field line in csrc/config and the line here that reads it.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "optim/rule.h"
#include "zero/offload/auto_placements.h"
#include "zero/gradients/grad_reducer.h"
#include "zero/gathers/param_gatherer.h"
#include "zero/offload/placements.h"
#include "zero/stage_policy.h"
#include "zero/step/stepper.h"

namespace ds::config {
class Config;
}

namespace ds::zero {

// By parameter group; null: the optimizer keeps states of its own. Empty: not known yet.
using OptimizerRules = std::vector<const optim::Rule*>;

struct RunFacts {
  int threads = 1;                           // of CPU kernels
  int ranks = 1;                             // that train the same model on other data
  c10::optional<at::ScalarType> grad_dtype;  // in which gradients are kept and added up; unset: the parameter's own
  int job_rank = 0;                          // this one, of all
  OptimizerRules rules{};
  bool codes_weights = false, codes_frozen = false;  // asked for beside the configuration (zero.Init)
};

struct EngineOptions {
  StagePolicy policy = stage_policy(0);
  int threads = 1;
  c10::optional<at::ScalarType> grad_dtype;
  OptimizerRules rules;             // `memory` needs room for their states
  Placements placements;            // of masters, gradients, optimizer states and slices of parameters
  std::optional<TierBytes> memory;  // instead of `placements`: they are planned for this memory
  ParamOffload param_offload;
  Swapping swapping;  // transfers of buffers of other tiers
  storage::FileAccess files;
  storage::Budget budget;  // of all memory that the engine has, by medium
  ReducerOptions reducer;
  GatherOptions gather;
  std::string strategy = "plain";                 // the elements that a step updates at once, see strategies/
  StrategyOptions step;                           // of that strategy
  int64_t allgather_bucket_numel = INT64_MAX;     // limit of a gather after the step
  GathererOptions gatherer;                       // stage 3
  bool codes_weights = false;                     // stage 3: slices travel as codes (ZeRO++ qwZ)
  bool codes_frozen = false;                      // stage 3: slices that are not trained rest as codes (MixZ++)
  const kernels::KernelTable* kernels = nullptr;  // other kernels than the device's, which may fail: for tests
};

// The row of the stage table that the configuration asks for.
const StagePolicy& policy_of(const config::Config& config);

EngineOptions engine_options(const config::Config& config, const RunFacts& facts);

// The placement of slices that leave the device before there is an engine. `device`: "cpu" or "nvme".
struct RemoteOptions {
  storage::Placement placement;
  ParamOffload offload;
  storage::FileAccess files;
};
RemoteOptions remote_options(const config::Config& config, const std::string& device, bool pinned, int rank);

}  // namespace ds::zero

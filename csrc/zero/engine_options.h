// What an engine does, from the resolved configuration and the facts of this run. The only place that reads a key for
// the engine: a new one costs its Field line in csrc/config and the line here that reads it.
#pragma once
#include <string>

#include "zero/grad_reducer.h"
#include "zero/param_gatherer.h"
#include "zero/placements.h"
#include "zero/stage_policy.h"
#include "zero/stepper.h"

namespace ds::config {
class Config;
}

namespace ds::zero {

struct RunFacts {
  int threads = 1;                           // of CPU kernels
  int ranks = 1;                             // that train the same model on other data
  c10::optional<at::ScalarType> grad_dtype;  // in which gradients are kept and added up; unset: the parameter's own
};

struct EngineOptions {
  StagePolicy policy = stage_policy(0);
  int threads = 1;
  c10::optional<at::ScalarType> grad_dtype;
  Placements places;       // where masters, gradients and optimizer states rest
  storage::Budget budget;  // of all memory that the engine has, by medium
  ReducerOptions reducer;
  GatherOptions gather;
  std::string strategy = "plain";                 // what a step updates at once, see strategies/
  int64_t allgather_bucket_numel = INT64_MAX;     // limit of a gather after the step
  GathererOptions gatherer;                       // stage 3
  const kernels::KernelTable* kernels = nullptr;  // other kernels than the device's, which may fail: for tests
};

EngineOptions engine_options(const config::Config& config, const RunFacts& facts);

}  // namespace ds::zero

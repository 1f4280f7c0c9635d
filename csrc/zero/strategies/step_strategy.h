// Which of the elements that a rank owns are updated in a step, and which later.
//
// A step has one norm and one decision: whether it is skipped, and the factor that unscales and clips. Then its
// strategy names the parts of the update that are made now. What a part leaves out may be put by (its gradient, with
// its own factor) and updated by a part of a later step, from memory of the strategy's. Adding a strategy is adding a
// file with a StrategyRegistration; EngineOptions::strategy names it.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/device_context.h"
#include "zero/grad_reducer.h"
#include "zero/param_store.h"

namespace ds::zero {

struct UpdatePart {
  // Whether this part updates an extent (of ShardMap::extents) that this rank owns. Unset: all. Rules that look at
  // whole parameters (LAMB's norms, Muon's matrices) take no part of them.
  std::function<bool(const ParamSpace&, size_t extent)> takes;
  // Gradients, instead of the reduced ones.
  std::function<const Buffer&(const ParamSpace&)> grads;
  // Parameters with a gradient, the same on all ranks. Unset: those that a rank has used in this step.
  std::function<bool(size_t param)> used;
  // How many updates each parameter has seen in such parts: float, on the CPU. Unset: the optimizer's own count.
  at::Tensor steps;
  // Factor and skipping, in memory of the device. Null: those of this step.
  const kernels::StepScale* scale = nullptr;
};

class StepStrategy {
 public:
  virtual ~StepStrategy() = default;

  // Once in each step, skipped ones included, when its norm and decision are known (DeviceContext::read_step_scale) and
  // before anything is changed. Parts of one step take different extents, and are as many on every rank.
  virtual std::vector<UpdatePart> parts() = 0;

  // Somebody else is about to read or write masters and optimizer states: what runs beside the training has ended then.
  virtual void settle() {}
};

// What a strategy works with; all of it outlives it.
struct StrategyParts {
  ParamStore& store;
  DeviceContext& device;
  const GradReducer& grads;
};

struct StrategyRegistration {
  using Make = std::unique_ptr<StepStrategy> (*)(const StrategyParts&);
  StrategyRegistration(const std::string& name, Make make);
};

// Fails with the names that there are.
std::unique_ptr<StepStrategy> make_strategy(const std::string& name, const StrategyParts& parts);

}  // namespace ds::zero

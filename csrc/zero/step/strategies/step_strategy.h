// The choice of the elements that a step updates at once, and of those that are updated later.
//
// A step has one norm and one decision: whether it is skipped, and the factor that unscales and clips. Then its
// strategy names the parts of the update that are made now. What a part leaves out may be put by (its gradient, with
// its own factor) and updated by a part of a later step, from memory of the strategy's. Adding a strategy is adding a
// file with a StrategyRegistration; EngineOptions::strategy names it.
//
// [Note: what a strategy keeps]
// Gradients that belong to no step yet are the reducer's: whoever drops or writes them tells forget(), and what was
// made of them ahead of the step is undone. What earlier steps have put by belongs to those steps, as weights and
// states do: dropping gradients (zero_grad, which programs call after every step) leaves it, and checkpoints have it
// (states() and counters()).
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "optim/rule.h"
#include "zero/device_context.h"
#include "zero/gradients/grad_arrivals.h"
#include "zero/gradients/grad_reducer.h"
#include "zero/spaces/param_store.h"
#include "zero/step/step.h"
#include "zero/step/strategies/strategy_options.h"

namespace ds::zero {

class Stepper;

struct UpdatePart {
  // Whether this part updates an extent (of ShardMap::extents) that this rank owns. Unset: all. Rules that look at
  // whole parameters (LAMB's norms, Muon's matrices) take no part of them.
  std::function<bool(const ParamSpace&, size_t extent)> takes;
  // Whether it may leave out extents of that space. Unset: of any where `takes` is set.
  std::function<bool(const ParamSpace&)> cuts;
  // Gradients, instead of the reduced ones.
  std::function<const Buffer&(const ParamSpace&)> grads;
  // Parameters with a gradient, the same on all ranks. Unset: those that a rank has used in this step.
  std::function<bool(size_t param)> used;
  // Number of updates that each parameter has seen in such parts: float, on the CPU. Unset: the optimizer's own count.
  at::Tensor steps;
  // Factor and skipping, in memory of the device. Null: those of this step.
  const kernels::StepScale* scale = nullptr;
};

// Numbers that are the same on all ranks and for any number of ranks, by name.
using Counters = std::map<std::string, std::vector<double>>;

class StepStrategy {
 public:
  virtual ~StepStrategy() = default;

  // Once in each step, skipped ones included, when its norm and decision are known (DeviceContext::read_step_scale) and
  // before anything is changed. Parts of one step take different extents, and are as many on every rank.
  virtual std::vector<UpdatePart> parts(const StepInputs& inputs) = 0;

  // Somebody else is about to read or write masters and optimizer states: they are those of the steps that were made,
  // and what runs beside the training has ended.
  virtual void settle() {}
  // Gradients that no step has had are dropped, or written by somebody.
  virtual void forget() {}

  // Whether updates go on when a step has ended; settle() waits for them.
  virtual bool runs_beside() const { return false; }
  // Fails for a rule that it cannot update, naming the optimizer.
  virtual void check(const optim::Rule& rule) const {}
  // Whether expect() is of use: before a backward after which the next step follows, what that step will be told, as
  // far as is known by then.
  virtual bool expects() const { return false; }
  virtual void expect(const StepInputs& inputs) {}
  virtual GradArrivals* arrivals() { return nullptr; }

  // The values that it keeps for each element, as further optimizer states: fp32, of this rank's shard.
  virtual std::vector<std::string> state_names() const { return {}; }
  virtual const Buffer* state(const ParamSpace& space, size_t number) { return nullptr; }
  virtual Counters counters() { return {}; }
  // After the states of a checkpoint have been read: goes on where counters() stood. Empty: it is of a run without
  // this strategy. True where weights of the model have changed, in this rank's shard.
  virtual bool restore(const Counters& counters) { return false; }
  virtual void set_steps_per_epoch(int64_t steps) {}

  // For reports, by name: counts and milliseconds.
  virtual std::map<std::string, double> figures() const { return {}; }
};

// The objects that a strategy works with; all but `options` outlive it.
struct StrategyParts {
  ParamStore& store;
  DeviceContext& device;
  const GradReducer& grads;
  Stepper* stepper = nullptr;
  StrategyOptions options{};
};

struct StrategyRegistration {
  using Make = std::unique_ptr<StepStrategy> (*)(const StrategyParts&);
  StrategyRegistration(const std::string& name, Make make);
};

// Fails with the names that there are.
std::unique_ptr<StepStrategy> make_strategy(const std::string& name, const StrategyParts& parts);

}  // namespace ds::zero

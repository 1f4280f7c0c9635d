// The training engine: puts parameters, gradients, communication and the step together by a row of the stage table.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/gradients/backward_session.h"
#include "zero/engine_options.h"
#include "zero/gathers/slice_memory.h"
#include "zero/spaces/mesh_spaces.h"
#include "zero/rank_failures.h"
#include "zero/states/state_access.h"

namespace ds::zero {

// Create with std::make_shared. Calls come from one thread; only the hooks come from autograd's.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `others`: stage 3: sharded parameters that are not trained. `spaces`: made of the same parameters. `window`: null
  // for one of its own. A caller that makes an engine with something in files tells the other ranks of an error
  // (MeshSpaces::abort): they wait in here until all have made their files.
  Engine(std::vector<ParamSpec> params, std::vector<ShardedParamPtr> others, const EngineOptions& options,
         MeshSpacesPtr spaces, std::shared_ptr<Window> window = nullptr);
  ~Engine();

  // One optimizer step on what backwards have left: reduces the rest, norm, decision, update, cast, gather; gradients
  // are forgotten then. What it throws before the update (a schedule that raises, kernels that have failed) leaves the
  // weights, the states and the gradients. What one rank cannot read or write ends the step on all of them, as does
  // what has failed in a thread of its strategy.
  StepReport step(const StepInputs& inputs);

  // Sets the native optimizer of each parameter group; see Stepper::set_rules. Fails where the strategy cannot.
  void set_rules(std::vector<const optim::Rule*> by_group);
  // Before a backward after which the next step follows, what that step will be told, as far as it is known.
  void expect(const StepInputs& inputs);
  // After the last backward before a step, on all ranks: names of parameters for which no rank has a gradient.
  std::vector<std::string> unused_params();
  void clear_grads();  // the gradients of the step to come are dropped, and what was made of them ahead of it

  void broadcast(const std::vector<at::Tensor>& tensors, int root);
  // Parameters that are not trained rest as codes from now on, with decoded values as their values; frozen ones that
  // the optimizer has take such values. All ranks.
  void code_frozen();
  void release();  // hooks off, parameters in memory of their own; the engine can only be destroyed after this

  BackwardSession& backward() { return backward_; }
  StateAccess& states() { return states_; }
  UserWrites& writes() { return writes_; }               // values that the user has written into the weights
  ParamGatherer* gatherer() { return gatherer_.get(); }  // null below stage 3
  ParamStore& params() { return store_; }
  GradReducer& grads() { return grads_; }
  Stepper& stepper() { return stepper_; }
  StepStrategy& strategy() { return *strategy_; }
  const DeviceContext& device() const { return device_; }
  const StagePolicy& policy() const { return policy_; }
  const RankFailures& failures() const { return failures_; }
  const MeshSpaces& spaces() const { return *spaces_; }

 private:
  void meet_where_files_are() const;
  StepReport make_step(const StepInputs& inputs);
  void tell_others(const std::exception& error) const;
  std::vector<std::pair<std::string, std::string>> nonfinite_grads();
  StoreOptions store_options(const std::vector<ParamSpec>& params, const EngineOptions& options);

  const StagePolicy policy_;
  const MeshSpacesPtr spaces_;
  const RankFailures failures_{[this](const std::exception& error) { tell_others(error); }};
  SliceMemory slices_;
  ParamStore store_;
  DeviceContext device_;
  GradReducer grads_;
  Stepper stepper_;
  std::unique_ptr<StepStrategy> strategy_;
  std::unique_ptr<ParamGatherer> gatherer_;
  BackwardSession backward_;
  UserWrites writes_;
  StateAccess states_;
};

}  // namespace ds::zero

// The training engine: puts parameters, gradients, communication and the step together by a row of the stage table.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/backward_session.h"
#include "zero/engine_options.h"
#include "zero/engine_ranks.h"
#include "zero/state_access.h"

namespace ds::zero {

// Create with std::make_shared. Calls come from one thread; only the hooks come from autograd's.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `others`: stage 3: sharded parameters that are not trained.
  Engine(std::vector<ParamSpec> params, std::vector<ShardedParamPtr> others, const EngineOptions& options,
         EngineRanks ranks);
  ~Engine();

  // One optimizer step on what backwards have left: reduces the rest, norm, decision, update, cast, gather; gradients
  // are forgotten then. What it throws before the update (a schedule that raises, kernels that have failed) leaves the
  // weights, the states and the gradients.
  StepReport step(const StepInputs& inputs);

  void broadcast(const std::vector<at::Tensor>& tensors, int root);
  void release();  // hooks off, parameters in memory of their own; the engine can only be destroyed after this

  BackwardSession& backward() { return backward_; }
  StateAccess& states() { return states_; }
  ParamGatherer* gatherer() { return gatherer_.get(); }  // null below stage 3
  ParamStore& params() { return store_; }
  GradReducer& grads() { return grads_; }
  Stepper& stepper() { return stepper_; }
  const DeviceContext& device() const { return device_; }
  const StagePolicy& policy() const { return policy_; }
  const comm::Communicator& data_parallel() const { return *ranks_.data_parallel; }
  void reset_traffic() { ranks_.data_parallel->reset_traffic(); }

 private:
  ShardSourcePtr shard_source() const;
  void refuse_unused() const;
  std::vector<std::pair<std::string, std::string>> nonfinite_grads();
  StoreOptions store_options(const std::vector<ParamSpec>& params, const EngineOptions& options);

  const StagePolicy policy_;
  const EngineRanks ranks_;
  std::vector<comm::PeerMemoryPtr> peers_;  // of each group of the store's sharded parameters
  ParamStore store_;
  DeviceContext device_;
  GradReducer grads_;
  Stepper stepper_;
  std::unique_ptr<StepStrategy> strategy_;
  std::unique_ptr<ParamGatherer> gatherer_;
  BackwardSession backward_;
  StateAccess states_;
};

}  // namespace ds::zero

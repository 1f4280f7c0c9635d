// The training engine: parameters, gradients, communication and the step, put together by a row of the stage table.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "zero/accumulator_hooks.h"
#include "zero/device_context.h"
#include "zero/engine_options.h"
#include "zero/engine_ranks.h"
#include "zero/state_hold.h"

namespace ds::zero {

// What is kept for each parameter, whole or in pieces.
enum class Kept { kMaster, kGrad, kSlot };

// Create with std::make_shared. Calls come from one thread; only the hooks come from autograd's.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `others`: stage 3: sharded parameters that are not trained.
  Engine(std::vector<ParamSpec> params, std::vector<ShardedParamPtr> others, const EngineOptions& options,
         EngineRanks ranks);
  ~Engine();

  void watch();  // hooks on the parameters that require grad now; the calls below do it by themselves

  // A backward that the caller runs between begin_backward and end_backward, or gives up with abort_backward. With a
  // `root` that it starts from, end_backward is called by itself when the outermost backward of that root ends.
  void begin_backward(bool reduce, const at::Tensor& root = {});
  void end_backward();
  bool abort_backward();

  // A backward that the user runs on what forward returned: `outputs` get hooks that call the two above by themselves.
  // What the latest plan says counts: whether that backward reduces, and the factor (loss scale over accumulation
  // steps) that the gradients are multiplied by as they come in.
  void watch_outputs(const std::vector<at::Tensor>& outputs);
  // Of tensors that came into the model from elsewhere in the graph: what the gradients leave through, which divides
  // by that factor again.
  at::Tensor gate_input(const at::Tensor& input);
  void plan_user_backward(bool reduce, double factor);
  // The gradients of the next backward that come from outside have been multiplied by it. Until the next forward.
  void set_outer_factor(double factor) { outer_factor_ = factor; }
  void forwarded(const std::vector<at::Tensor>& outputs, bool reduce, double factor) {
    watch();
    outer_factor_ = 1.0;
    plan_user_backward(reduce, factor);
    watch_outputs(outputs);
  }

  void finish_backward();
  // Once for each micro-step in which begin_backward was not called. True when there was no backward by the user
  // either, and no gradient waits for its reduction; with `reduce` this rank then takes part in the reduction that the
  // other ranks' backward starts.
  bool join_backward(bool reduce);
  void clear_grads() {
    if (user_backward_ || own_backward_) abort_backward();  // it raised half-way
    grads_.clear();
  }
  // After finish_backward, with nothing in between.
  void norm(float loss_scale, float max_norm, bool check) {
    stepper_.norm(grads_, loss_scale, max_norm, check, ranks_.model_parallel.get());
  }
  void update(const std::vector<std::vector<double>>& hyper) {
    hold_.wait();
    stepper_.update(grads_, hyper);
  }
  StepReport report() { return stepper_.report(); }

  // A step in few calls: begin_step; update, or an optimizer that lives outside; end_step.
  void begin_step(float loss_scale, float max_norm, bool check) {
    finish_backward();
    norm(loss_scale, max_norm, check);
    hold_.wait();  // an optimizer that lives outside comes next
  }
  // Gradients are kept when their norm is not finite: somebody will want to see them.
  StepReport end_step();
  // What the user, or a backward without hooks, has left in .grad is this rank's contribution from now on.
  void adopt_grads() {
    if (grads_.active()) grads_.end();
    grads_.begin(false);
    grads_.end();
  }

  // After begin_step, for an optimizer that lives outside: its parameters are `masters`, one for each piece. Gives each
  // its gradient, unscaled and clipped, in its own type (undefined where no rank produced one): the buffer itself where
  // that has the type, else a copy, so that 16-bit gradients are not rounded once more. take_back_grads() frees those.
  void assign_optimizer_grads(const std::vector<at::Tensor>& masters);
  void take_back_grads(const std::vector<at::Tensor>& masters);

  // Changes the type in which gradients are kept; those that are there are converted. Not during a backward.
  void set_grad_dtype(c10::optional<at::ScalarType> type) { grads_.set_grad_dtype(type); }

  // One tensor for each piece that this rank owns: views of the buffers; undefined where a group has no such slot.
  std::vector<at::Tensor> pieces(Kept kept, int slot);
  // The whole of a parameter, collected from all ranks, in its shape; fp32 (fp64 for fp64 parameters). Every rank calls
  // it. Undefined for a gradient that no rank produced, and for a slot that the parameter's group has not.
  at::Tensor full(Kept kept, int slot, size_t param);
  // The same of what this rank alone has accumulated and nobody has reduced, where that is kept apart (not at stage 0,
  // where it is the gradient); undefined where there is none. No communication.
  at::Tensor local_grad(size_t param);
  // Every rank calls it with the same values: each takes the pieces it owns; masters go to the model as well.
  void set_full(Kept kept, int slot, size_t param, const at::Tensor& value);

  void broadcast(const std::vector<at::Tensor>& tensors, int root);

  // After the update of a step: the model's weights are the new ones everywhere.
  void finish_step();
  // Around changes of masters or shards other than a step, which all ranks make. May be nested.
  void begin_write();
  void end_write();
  void refresh_master() {
    hold_.wait();
    stepper_.refresh_master();
  }

  StateHold& hold() { return hold_; }  // of masters and optimizer states; the calls above that change them wait
  std::vector<comm::CommunicatorPtr> communicators() const;  // all that it uses
  ParamGatherer* gatherer() { return gatherer_.get(); }      // null below stage 3

  const comm::Communicator& data_parallel() const { return *ranks_.data_parallel; }
  void reset_traffic() { ranks_.data_parallel->reset_traffic(); }
  const StagePolicy& policy() const { return policy_; }
  ParamStore& params() { return store_; }
  GradReducer& grads() { return grads_; }
  Stepper& stepper() { return stepper_; }
  const DeviceContext& device() const { return device_; }
  void release();  // hooks off, parameters in memory of their own; the engine can only be destroyed after this

 private:
  const Buffer* buffer(ParamSpace& space, Kept kept, int slot);  // null: no such slot
  double gate_factor() const { return user_factor_ / outer_factor_; }
  void leave_root();
  void queue_end();
  StoreOptions store_options(const std::vector<ParamSpec>& params, const EngineOptions& options);

  const StagePolicy policy_;
  const EngineRanks ranks_;
  comm::CommunicatorPtr gathers_;  // stage 3, where gathers are collectives
  comm::PeerMemoryPtr peers_;
  ParamStore store_;
  DeviceContext device_;
  GradReducer grads_;
  Stepper stepper_;
  std::unique_ptr<ParamGatherer> gatherer_;
  StateHold hold_;
  int writing_ = 0;
  std::vector<bool> watched_;
  bool had_user_backward_ = false;  // since the last end_step or join_backward
  bool own_backward_ = false;       // begin_backward was called by our caller
  at::Tensor root_;                 // that backward ends by itself; with a hook
  unsigned root_hook_ = 0;
  bool user_backward_ = false;  // by a hook on an output
  bool user_reduce_ = true;
  double user_factor_ = 1.0;
  double outer_factor_ = 1.0;
  AccumulatorHooks hooks_;  // last: gone before what they call
};

}  // namespace ds::zero

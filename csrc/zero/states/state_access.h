// Reading and writing what is kept of each parameter, in pieces or whole: for optimizers that live outside, checkpoints
// and users.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "zero/gradients/grad_reducer.h"
#include "zero/gathers/param_gatherer.h"
#include "zero/states/state_leases.h"
#include "zero/step/stepper.h"
#include "zero/step/user_writes.h"

namespace ds::zero {

class StateAccess {
 public:
  // `gatherer` may be filled later.
  StateAccess(ParamStore& store, DeviceContext& device, GradReducer& grads, Stepper& stepper, StepStrategy& strategy,
              const std::unique_ptr<ParamGatherer>& gatherer, UserWrites& writes)
      : store_(store),
        device_(device),
        grads_(grads),
        stepper_(stepper),
        strategy_(strategy),
        gatherer_(gatherer),
        writes_(writes) {}

  // In a step, for an optimizer that lives outside: its parameters are `masters`, one for each piece. Gives each
  // its gradient, unscaled and clipped, in its own type (undefined where no rank produced one): the buffer itself where
  // that has the type, else a copy, so that 16-bit gradients are not rounded once more. take_back_grads() frees those.
  void assign_optimizer_grads(const std::vector<at::Tensor>& masters);
  void take_back_grads(const std::vector<at::Tensor>& masters);

  // One tensor for each piece that this rank owns: views of the buffers, where those rest in memory; undefined where a
  // group has no such slot. Of pieces in files nothing but the shape (of the device "meta"), or with `copies` a copy.
  std::vector<at::Tensor> pieces(StateKind kind, int slot, bool copies = false);
  // One of them, by its number, for as long as the lease is held: what is written to it counts, wherever it rests.
  // Undefined where its group has no such slot.
  std::pair<storage::Lease, at::Tensor> piece(StateKind kind, int slot, size_t number, storage::Access access);
  at::Tensor piece_tensor(StateKind kind, int slot, size_t number);  // as pieces() with copies gives it
  // The whole of a parameter, collected from the ranks of its space, in its shape; fp32 (fp64 for fp64 parameters).
  // Every rank calls it. Undefined for a gradient that no rank produced, and for a slot that the parameter's group has
  // not.
  at::Tensor full(StateKind kind, int slot, size_t param);
  // The same of what this rank alone has accumulated and nobody has reduced, where that is kept apart (not at stage 0,
  // where it is the gradient); undefined where there is none. No communication.
  at::Tensor local_grad(size_t param);
  // `value` is what this rank alone has accumulated, from now on; at stage 0 too.
  void set_local_grad(size_t param, const at::Tensor& value) { grads_.set_local(param, value); }
  // Every rank calls it with the same values: each takes the pieces it owns; masters go to the model as well.
  void set_full(StateKind kind, int slot, size_t param, const at::Tensor& value);

  // The same two for states that live outside (an optimizer's that is not native): `own` has one tensor for each piece
  // that this rank owns, in the form that pieces() gives, undefined where there is none. Undefined when no rank has
  // one.
  at::Tensor full_of(const std::vector<at::Tensor>& own, size_t param);
  void set_full_of(const std::vector<at::Tensor>& own, size_t param, const at::Tensor& value);
  // This rank's slices of sharded parameters end to end, padding included: fp32, on the CPU, zero where nothing is.
  at::Tensor padded_slices(const std::vector<at::Tensor>& own, const std::vector<size_t>& params) const;
  // In which the elements of a space (by its number) lie; null: no such slot.
  const Buffer* buffer_of(StateKind kind, int slot, int32_t space) {
    return buffer(store_.spaces()[space], kind, slot);
  }

  // After the update of a step: the model's weights are the new ones everywhere.
  void finish_step();
  void refresh_master();
  void publish();  // Stepper::publish

  // Holds masters and optimizer states as they are until let_go; the calls above that change them wait.
  void hold_states();
  StateLeases& hold() { return hold_; }

  // Names of all slots: the optimizer's, then the strategy's. A slot number is an index into this list.
  std::vector<std::string> slot_names() const;
  // Goes on where StepStrategy::counters, and the numbers that the optimizer keeps of parameters, stood; after states
  // have been read. Errors of exchanges start anew. Every rank calls it.
  void restore_strategy(const Counters& counters);

 private:
  friend class WriteScope;
  void begin_write();
  void end_write();
  template <typename Visit>
  void visit_own(const std::vector<at::Tensor>& own, size_t param, const Visit& visit) const;
  const Buffer* buffer(ParamSpace& space, StateKind kind, int slot);  // null: no such slot
  std::vector<plan::Extent> own_extents(size_t param) const;

  ParamStore& store_;
  DeviceContext& device_;
  GradReducer& grads_;
  Stepper& stepper_;
  StepStrategy& strategy_;
  const std::unique_ptr<ParamGatherer>& gatherer_;
  UserWrites& writes_;
  StateLeases hold_{store_};
  int writing_ = 0;
};

// A change of masters or shards other than a step, from the construction to close(); all ranks make it, and scopes may
// be nested. The destructor closes what is open, so that later writes are seen and no rank waits for this one; what
// goes wrong then is dropped: an exception is on its way already.
class WriteScope {
 public:
  explicit WriteScope(StateAccess& states) : states_(&states) { states.begin_write(); }
  ~WriteScope();
  WriteScope(const WriteScope&) = delete;
  WriteScope& operator=(const WriteScope&) = delete;
  void close();

 private:
  StateAccess* states_;  // null: closed
};

}  // namespace ds::zero

// Gradients as users see them between backward and step: a view of the flat buffer as .grad, and what they put there.
//
// Only gradients that lie whole on every rank are shown, and only where they have the parameter's own dtype (autograd
// allows no other). Edits of .grad count: in place they change the buffer itself; another tensor as
// .grad is copied into the slot; a .grad that is gone is not a gradient. A script that keeps such a tensor (g =
// param.grad) when its gradient is forgotten has it with its values from then on: the next gradient comes into another
// one.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "zero/device_context.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

// Whether a slot holds a gradient.
enum class SlotState : uint8_t {
  kEmpty,
  kEarlier,  // of earlier backwards, or of the user: not multiplied by what the running one's sum needs
  kCurrent,  // of the running backward alone
};

class GradViews {
 public:
  GradViews(ParamStore& store, DeviceContext& device) : store_(store), device_(device), slots_(store.size()) {}

  // Whether the parameter's .grad shows its slot.
  bool shows(size_t param) const {
    const ParamSpace& space = store_.space_of(param);
    return space.in_place && space.grad.dtype == space.key.dtype;
  }
  // The slot in the parameter's shape. Made once: making a tensor costs as much as all else that a gradient costs. Its
  // memory is that of the gradients now, or none.
  const at::Tensor& slot(size_t param);
  void forget_slots() { slots_.assign(store_.size(), at::Tensor()); }  // the buffers are others
  void follow_moves();                                                 // the buffers have moved
  void forget(size_t param);  // nobody wants the gradient any more, and .grad does not show it

  void attach(const std::vector<SlotState>& filled);  // .grad shows the slots that hold a gradient
  void attach(size_t param) { store_.spec(param).tensor.mutable_grad() = slot(param); }
  void detach();  // every .grad is undefined

  // Takes the values of .grad that the user has left; `filled` then marks the slots that hold a gradient. Gradients
  // that are not shown go to `elsewhere`, and their .grad is undefined.
  // `need` is called before a slot is written.
  using Elsewhere = std::function<void(size_t param, const at::Tensor& grad)>;
  void adopt(std::vector<SlotState>& filled, const std::function<void(size_t param)>& need, const Elsewhere& elsewhere);

 private:
  ParamStore& store_;
  DeviceContext& device_;
  std::vector<at::Tensor> slots_;  // of each parameter where .grad has been shown
};

}  // namespace ds::zero

#include "zero/gradients/grad_views.h"

namespace ds::zero {

const at::Tensor& GradViews::slot(size_t param) {
  const ParamSpec& spec = store_.spec(param);
  at::Tensor& view = slots_[param];
  if (!view.defined() || view.requires_grad() || view.sizes() != spec.sizes() || view.strides() != spec.strides())
    view = store_.grad_view(param);
  return view;
}

void GradViews::attach(const std::vector<SlotState>& filled) {
  for (size_t param = 0; param < store_.size(); ++param) {
    if (!store_.space_of(param).in_place) continue;
    if (filled[param] != SlotState::kEmpty && shows(param)) {
      attach(param);
    } else {
      store_.spec(param).tensor.mutable_grad() = at::Tensor();
    }
  }
}

void GradViews::detach() {
  for (size_t param = 0; param < store_.size(); ++param) store_.spec(param).tensor.mutable_grad() = at::Tensor();
}

void GradViews::adopt(std::vector<SlotState>& filled, const Elsewhere& elsewhere) {
  for (size_t param = 0; param < store_.size(); ++param) {
    at::Tensor& grad = store_.spec(param).tensor.mutable_grad();
    if (!grad.defined()) {
      if (shows(param)) filled[param] = SlotState::kEmpty;
      continue;
    }
    if (!store_.space_of(param).in_place) {
      elsewhere(param, grad);
      grad = at::Tensor();
      continue;
    }
    const at::Tensor& slot = this->slot(param);
    const bool ours = shows(param) && !grad.is_sparse() && grad.data_ptr() == slot.data_ptr();
    if (!ours) device_.copy(slot, grad, 1.0f);
    filled[param] = SlotState::kEarlier;
    if (!shows(param)) grad = at::Tensor();
  }
}

}  // namespace ds::zero

#include "zero/gradients/grad_views.h"

namespace ds::zero {

const at::Tensor& GradViews::slot(size_t param) {
  const ParamSpec& spec = store_.spec(param);
  at::Tensor& view = slots_[param];
  if (!view.defined() || view.requires_grad() || view.sizes() != spec.sizes() || view.strides() != spec.strides())
    view = store_.own_grad_view(param);
  else if (view.storage().nbytes() == 0 && view.numel() > 0)
    store_.follow_move(view, param);
  return view;
}

void GradViews::forget(size_t param) {
  at::Tensor& view = slots_[param];
  if (!view.defined()) return;
  if (view.use_count() == 1 && view.storage().use_count() == 1) {
    if (store_.frees_grads()) store_.empty_view(view);
    return;
  }
  store_.leave_with_values(view);
  view = at::Tensor();
}

void GradViews::follow_moves() {
  for (size_t param = 0; param < slots_.size(); ++param)
    if (slots_[param].defined()) store_.follow_move(slots_[param], param);
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

void GradViews::adopt(std::vector<SlotState>& filled, const std::function<void(size_t param)>& need,
                      const Elsewhere& elsewhere) {
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
    const bool ours =
        shows(param) && !grad.is_sparse() && grad.numel() > 0 && grad.data_ptr() == slot(param).data_ptr();
    if (!ours) {
      forget(param);
      need(param);
      device_.copy(slot(param), grad, 1.0f);
    }
    filled[param] = SlotState::kEarlier;
    if (!shows(param)) grad = at::Tensor();
  }
}

}  // namespace ds::zero

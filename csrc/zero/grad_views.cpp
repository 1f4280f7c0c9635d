// The part of GradReducer that users see between backward and step: gradients as .grad, and what they put there.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "base/error.h"
#include "zero/grad_reducer.h"

namespace ds::zero {

bool GradReducer::attaches(size_t param) const {
  const ParamSpace& space = store_.space_of(param);
  return space.in_place && space.grad.data.scalar_type() == space.key.dtype;
}

// The slot as the parameter's .grad. Made once: making a tensor costs as much as all other bookkeeping of a gradient.
const at::Tensor& GradReducer::slot_view(size_t param) {
  const at::Tensor& tensor = store_.spec(param).tensor;
  at::Tensor& view = slot_views_[param];
  if (!view.defined() || view.requires_grad() || view.sizes() != tensor.sizes() || view.strides() != tensor.strides())
    view = store_.view(param, store_.space_of(param).grad.data);
  return view;
}

void GradReducer::attach_grads() {
  for (size_t param = 0; param < store_.size(); ++param) {
    if (!store_.space_of(param).in_place) continue;
    at::Tensor& grad = store_.spec(param).tensor.mutable_grad();
    if (filled_[param] && attaches(param)) {
      grad = slot_view(param);
    } else {
      grad = at::Tensor();
    }
  }
}

// Between backward and step the user may edit .grad in place, replace it or drop it: all of that counts. Where
// gradients are sharded there is no .grad to edit; one that the user sets is this rank's contribution to the sum.
void GradReducer::adopt_user_grads() {
  for (size_t param = 0; param < store_.size(); ++param) {
    at::Tensor& grad = store_.spec(param).tensor.mutable_grad();
    if (!grad.defined()) {
      if (attaches(param)) filled_[param] = 0;
      continue;
    }
    if (!store_.space_of(param).in_place) {
      make_room();
      store_.need_local();
      const GradBucket& bucket = buckets_[bucket_of_[param]];
      const at::Tensor slots = store_.space_of(param).local.narrow(0, bucket.begin, bucket.numel);
      slots_.put(param, slots, bucket.begin, grad, 1.0f, filled_[param] != 0);
      filled_[param] = 1;
      dirty_ = true;
      grad = at::Tensor();
      continue;
    }
    const at::Tensor slot = slot_view(param);
    const bool ours = attaches(param) && !grad.is_sparse() && grad.data_ptr() == slot.data_ptr();
    if (!ours) device_.copy(slot, grad, 1.0f);
    filled_[param] = 1;
    if (!attaches(param)) grad = at::Tensor();
  }
}

void GradReducer::set_grad_dtype(c10::optional<at::ScalarType> type) {
  if (type == store_.grad_dtype()) return;
  if (active()) fail(ErrorKind::kRuntime, "the type of gradients cannot change while a backward runs");
  at::NoGradGuard no_grad;
  adopt_user_grads();
  store_.set_grad_dtype(type);
  std::fill(slot_views_.begin(), slot_views_.end(), at::Tensor());
  memory_.clear();
  attach_grads();
}

bool GradReducer::has_local(size_t param) const {
  const ParamSpace& space = store_.space_of(param);
  return !space.in_place && filled_[param] && space.local.defined();
}

void GradReducer::set_used(size_t param) {
  if (store_.space_of(param).in_place) {
    filled_[param] = 1;
    if (attaches(param)) store_.spec(param).tensor.mutable_grad() = slot_view(param);
    return;
  }
  GradBucket& bucket = buckets_[bucket_of_[param]];
  if (store_.grad_buffer_aliased()) store_.split_grad_buffer();
  if (!bucket.reduced) row(bucket).zero_();
  bucket.reduced = holds_reduced_ = true;
  used_[param] = 1;
}

}  // namespace ds::zero

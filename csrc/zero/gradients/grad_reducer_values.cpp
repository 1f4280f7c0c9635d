// Gradients that the user, or somebody else outside of a backward, has set or asks for.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include "base/error.h"
#include "zero/gradients/grad_reducer.h"

namespace ds::zero {

at::Tensor GradReducer::local_slots(GradBucket& bucket) {
  bucket.slots = at::Tensor();
  reduction_.need_slots(bucket, slots_);
  return std::exchange(bucket.slots, at::Tensor());
}

// Takes what the user has left in .grad; if gradients are sharded, it is this rank's contribution to the sum.
void GradReducer::adopt_user_grads() {
  const auto need = [this](size_t param) { local_slots(bucket_of(param)); };
  views_.adopt(filled_, need, [this](size_t param, const at::Tensor& grad) {
    GradBucket& bucket = bucket_of(param);
    changes(bucket);
    make_room();
    store_.need_local();
    slots_.put(param, local_slots(bucket), bucket.begin, grad, 1.0f, filled(param));
    filled_[param] = SlotState::kEarlier;
    dirty_ = true;
  });
  slots_.settle();
}

void GradReducer::set_grad_dtype(c10::optional<at::ScalarType> type) {
  if (type == store_.grad_dtype()) return;
  if (active()) fail(ErrorKind::kRuntime, "the type of gradients cannot change while a backward runs");
  at::NoGradGuard no_grad;
  adopt_user_grads();
  store_.set_grad_dtype(type);
  views_.forget_slots();
  reduction_.memory().clear();
  views_.attach(filled_);
}

bool GradReducer::has_local(size_t param) const {
  const ParamSpace& space = store_.space_of(param);
  return !space.in_place && filled(param) && space.local.exists();
}

void GradReducer::set_local(size_t param, const at::Tensor& grad) {
  if (active()) fail(ErrorKind::kRuntime, "a gradient cannot be set while a backward runs");
  at::NoGradGuard no_grad;
  adopt_user_grads();
  make_room();
  store_.need_local();
  GradBucket& bucket = bucket_of(param);
  changes(bucket);
  slots_.put(param, local_slots(bucket), bucket.begin, grad, 1.0f, false);
  slots_.settle();
  filled_[param] = SlotState::kEarlier;
  dirty_ = true;
  if (views_.shows(param)) views_.attach(param);
}

void GradReducer::set_used(size_t param) {
  if (store_.space_of(param).in_place) {
    local_slots(bucket_of(param));
    slots_.settle();
    filled_[param] = SlotState::kEarlier;
    if (views_.shows(param)) views_.attach(param);
    return;
  }
  GradBucket& bucket = bucket_of(param);
  if (store_.grad_buffer_aliased()) store_.split_grad_buffer();
  if (!bucket.row_holds) reduction_.zero_row(bucket);
  bucket.row_holds = true;
  used_[param] = 1;
}

bool GradReducer::any() const {
  for (size_t param = 0; param < store_.size(); ++param)
    if (filled(param) || used_[param] || store_.spec(param).tensor.grad().defined()) return true;
  return false;
}

}  // namespace ds::zero

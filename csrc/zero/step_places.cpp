#include "zero/step_places.h"

#include <algorithm>

namespace ds::zero {

DeviceContext& StepPlaces::context(storage::Medium at) {
  if (at == storage::Medium::kDevice || device_.device().is_cpu()) return device_;
  if (!host_) {
    host_ = std::make_unique<DeviceContext>(c10::Device(at::kCPU), device_.threads());
    share_step_scale();
  }
  return *host_;
}

void StepPlaces::share_step_scale() {
  if (host_) host_->set_step_scale(device_.read_step_scale());
}

storage::Medium StepPlaces::of_pass(const ParamSpace& space, const optim::Rule& rule, bool scaled,
                                    int32_t bucket) const {
  if (rule.scratch || rule.sums > 0 || scaled) return storage::Medium::kDevice;
  return resting(space, space.master, bucket).value_or(storage::Medium::kHost);
}

bool StepPlaces::hold_all(const ParamSpace& space, const Buffer& grad, int32_t bucket, storage::Medium at) const {
  const auto there = [&](const Buffer& buffer) { return resting(space, buffer, bucket) == at; };
  return there(space.master) && there(grad) && there(space.lp) &&
         std::all_of(space.slots.begin(), space.slots.end(), there);
}

void StepPlaces::prefetch(const ParamSpace& space, const Buffer& grad, int32_t bucket, storage::Medium at) const {
  const auto hint = [&](const Buffer& buffer) {
    store_.storage()->prefetch(buffer.plane, part_of(space, buffer, bucket), at);
  };
  hint(space.master);
  hint(grad);
  for (const Buffer& slot : space.slots) hint(slot);
}

}  // namespace ds::zero

// Masters become the model's weights, and the other way round.
#include <c10/core/GradMode.h>

#include "zero/step/stepper.h"

namespace ds::zero {

namespace {

void copy_row(const StepMemory& memory, const DeviceContext& device, const ParamSpace& space, const Buffer& to,
              const Buffer& from, int32_t bucket) {
  const auto lease = [&](const Buffer& buffer, storage::Access access) {
    return memory.lease_at_rest(space, buffer, bucket, access);
  };
  const LeasedRow source = lease(from, storage::Access::kRead);
  device.copy(lease(to, storage::Access::kWrite).data(), source.data(), 1.0f);
}

}  // namespace

void Stepper::publish() {
  at::NoGradGuard no_grad;
  for (ParamSpace& space : store_.spaces()) {
    for (auto b = static_cast<int32_t>(space.map.buckets.size()) - 1; b >= 0; --b) {
      if (space.has_masters()) copy_row(memory_, device_, space, space.lp, space.master, b);
      if (space.gathers_after_step()) gather_.start(space, space.map.buckets[b]);
    }
  }
  gather_.finish();
}

void Stepper::gather() {
  for (const ParamSpace& space : store_.spaces())
    if (space.gathers_after_step()) gather_.start_all(space);
  gather_.finish();
}

void Stepper::refresh_master() {
  at::NoGradGuard no_grad;
  for (ParamSpace& space : store_.spaces()) {
    for (size_t b = 0; space.has_masters() && b < space.map.buckets.size(); ++b)
      copy_row(memory_, device_, space, space.master, space.lp, static_cast<int32_t>(b));
    memory_.arrive(space);
  }
}

}  // namespace ds::zero

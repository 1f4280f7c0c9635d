#include "zero/step/step_memory.h"

#include "base/error.h"
#include "base/ranges.h"
#include "storage/fence.h"

namespace ds::zero {

DeviceContext& StepMemory::context(storage::Medium at) {
  if (at == storage::Medium::kDevice || storage::done_on_return(device_.device())) return device_;
  if (!host_) {
    host_ = std::make_unique<DeviceContext>(device_.threads());
    share_step_scale();
  }
  return *host_;
}

void StepMemory::share_step_scale() {
  if (host_) host_->set_step_scale(device_.read_step_scale());
}

storage::Medium StepMemory::of_pass(const ParamSpace& space, const optim::Rule& rule, bool scaled,
                                    int32_t bucket) const {
  if (rule.scratch || rule.sums > 0 || scaled) return storage::Medium::kDevice;
  return resting(space, space.master, bucket).value_or(storage::Medium::kHost);
}

bool StepMemory::hold_all(const ParamSpace& space, const Buffer& grad, int32_t bucket, storage::Medium at) const {
  const auto there = [&](const Buffer& buffer) { return resting(space, buffer, bucket) == at; };
  return there(space.master) && there(grad) && there(space.lp) && all_of(space.slots, there);
}

// Masters, gradients and states of a bucket are in memory together.
void StepMemory::check_buffers(const optim::Rule& rule) const {
  const auto given = static_cast<size_t>(store_.swapping().buffer_count), needed = rule.slots.size() + 2;
  if (given == 0 || given >= needed) return;
  fail(ErrorKind::kValue, "zero_optimization.offload_optimizer.buffer_count = ", given, " is too small: '", rule.name,
       "' keeps ", rule.slots.size(),
       " states of each parameter, which a step needs beside masters and gradients. Set it "
       "to ",
       needed, ". A buffer has ", store_.largest_row() * 4, " bytes here, as the largest bucket of this rank");
}

void StepMemory::arrive(const ParamSpace& space) const {
  const auto wait_for = [&](const Buffer& buffer) {
    if (buffer.data.defined() || store_.storage()->resting(buffer.plane, {0, buffer.numel})) {
      store_.lease(buffer, {0, buffer.numel}, storage::Access::kRead);
      return;
    }
    for (const plan::Bucket& bucket : space.map.buckets)
      if (store_.storage()->resting(buffer.plane, space.row_in(buffer, bucket)))
        store_.lease(buffer, space.row_in(buffer, bucket), storage::Access::kRead);
  };
  wait_for(space.master);
  for (const Buffer& slot : space.slots) wait_for(slot);
}

void StepMemory::prefetch(const ParamSpace& space, const Buffer& grad, int32_t bucket, storage::Medium at) const {
  if (!store_.swapping().reads_ahead) return;
  const auto hint = [&](const Buffer& buffer) {
    store_.storage()->prefetch(buffer.plane, part_of(space, buffer, bucket), at);
  };
  hint(space.master);
  hint(grad);
  for (const Buffer& slot : space.slots) hint(slot);
}

}  // namespace ds::zero

#include "zero/buffer_pool.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace ds::zero {

namespace {

int64_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

}  // namespace

at::Tensor BufferPool::take(int64_t numel, const at::TensorOptions& options) {
  const auto fits = [&](const Idle& idle) {
    return idle.memory.numel() == numel && idle.memory.scalar_type() == options.dtype().toScalarType() &&
           idle.memory.device() == options.device();
  };
  // The latest first: it is in the cache, and the oldest are the next to go.
  const auto found = std::find_if(idle_.rbegin(), idle_.rend(), fits);
  if (found == idle_.rend()) {
    const at::Tensor fresh = at::empty({numel}, options);
    need_room_for(bytes_of(fresh));
    return fresh;
  }
  const Idle idle = std::move(*found);
  idle_.erase(std::next(found).base());
  if (idle.given_on) {
    const c10::impl::VirtualGuardImpl device(idle.memory.device().type());
    const c10::Stream now = device.getStream(idle.memory.device());
    if (now != *idle.given_on) {
      idle.done->block(now);
      device.recordDataPtrOnStream(idle.memory.storage().data_ptr(), now);
    }
  }
  return idle.memory;
}

void BufferPool::give(const at::Tensor& buffer) {
  if (!buffer.defined()) return;
  need_room_for(bytes_of(buffer));
  Idle idle{buffer, std::nullopt, std::nullopt};
  if (!buffer.device().is_cpu()) {
    const c10::impl::VirtualGuardImpl device(buffer.device().type());
    idle.given_on = device.getStream(buffer.device());
    idle.done.emplace(buffer.device().type());
    idle.done->record(*idle.given_on);
    device.recordDataPtrOnStream(buffer.storage().data_ptr(), *idle.given_on);
  }
  idle_.push_back(std::move(idle));
  for (int64_t held = held_bytes(); held > 2 * largest_; idle_.pop_front()) held -= bytes_of(idle_.front().memory);
}

int64_t BufferPool::held_bytes() const {
  int64_t bytes = 0;
  for (const Idle& idle : idle_) bytes += bytes_of(idle.memory);
  return bytes;
}

}  // namespace ds::zero

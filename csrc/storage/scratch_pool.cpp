#include "storage/scratch_pool.h"

#include <ATen/ops/empty.h>

#include <exception>
#include <utility>

#include "base/sizes.h"
#include "storage/flat_view.h"

namespace ds::storage {

at::Tensor ScratchPool::take(int64_t bytes, c10::Device device) {
  // The smallest one that is large enough. The latest of equal ones: it is in the cache, and the oldest go next.
  auto found = idle_.end(), largest = idle_.end();
  for (auto idle = idle_.begin(); idle != idle_.end(); ++idle) {
    const int64_t has = bytes_of(idle->memory);
    if (largest == idle_.end() || has > bytes_of(largest->memory)) largest = idle;
    if (idle->memory.device() != device || has < bytes || (has > bytes && reuse_ != Reuse::kAnySize)) continue;
    if (found == idle_.end() || has <= bytes_of(found->memory)) found = idle;
  }
  if (found == idle_.end()) {
    if (reuse_ == Reuse::kAnySize && largest != idle_.end()) remove(largest);
    return {};
  }
  const Idle idle = remove(found);
  if (idle.given) idle.given->wait(idle.memory);
  return idle.memory;
}

ScratchPool::Idle ScratchPool::remove(std::deque<Idle>::iterator position) {
  Idle idle = std::move(*position);
  idle_.erase(position);
  idle_bytes_ -= bytes_of(idle.memory);
  return idle;
}

at::Tensor ScratchPool::take(int64_t numel, const at::TensorOptions& options) {
  const auto type = options.dtype().toScalarType();
  const int64_t bytes = sizes::product("bytes of scratch", numel, static_cast<int64_t>(c10::elementSize(type)));
  keep_two_of(bytes);
  const at::Tensor idle = take(bytes, options.device());
  if (!idle.defined()) return at::empty({numel}, options);
  return idle.scalar_type() == type && idle.numel() == numel ? idle : flat_view(idle, 0, type, numel);
}

void ScratchPool::give(const at::Tensor& memory, const FencePtr& ready) {
  if (!memory.defined() || reuse_ == Reuse::kNone) return;
  keep_two_of(bytes_of(memory));
  Idle idle{memory, nullptr};
  try {
    if (ready) ready->wait(memory);
    idle.given = Fence::after(memory);
  } catch (const std::exception&) {
    return;  // a device that has failed: it says so to whoever works on it
  }
  idle_bytes_ += bytes_of(memory);
  idle_.push_back(std::move(idle));
  trim(limit_);
}

void ScratchPool::trim(int64_t bytes) {
  for (; idle_bytes_ > bytes; idle_.pop_front()) idle_bytes_ -= bytes_of(idle_.front().memory);
}

}  // namespace ds::storage

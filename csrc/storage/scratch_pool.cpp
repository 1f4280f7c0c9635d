#include "storage/scratch_pool.h"

#include <ATen/ops/empty.h>

#include <exception>
#include <iterator>
#include <utility>

#include "base/sizes.h"
#include "storage/flat_view.h"

namespace ds::storage {

at::Tensor ScratchPool::take(int64_t bytes, c10::Device device) {
  const auto fits = [&](const Idle& idle) { return bytes_of(idle.memory) == bytes && idle.memory.device() == device; };
  // The latest first: it is in the cache, and the oldest are the next to go.
  const auto found = std::find_if(idle_.rbegin(), idle_.rend(), fits);
  if (found == idle_.rend()) return {};
  const Idle idle = std::move(*found);
  idle_.erase(std::next(found).base());
  idle_bytes_ -= bytes;
  if (idle.given) idle.given->wait(idle.memory);
  return idle.memory;
}

at::Tensor ScratchPool::take(int64_t numel, const at::TensorOptions& options) {
  const auto type = options.dtype().toScalarType();
  const int64_t bytes = sizes::product("bytes of scratch", numel, static_cast<int64_t>(c10::elementSize(type)));
  keep_two_of(bytes);
  const at::Tensor idle = take(bytes, options.device());
  if (!idle.defined()) return at::empty({numel}, options);
  return idle.scalar_type() == type ? idle : flat_view(idle, 0, type, numel);
}

void ScratchPool::give(const at::Tensor& memory, const FencePtr& ready) {
  if (!memory.defined()) return;
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

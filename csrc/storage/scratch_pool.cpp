#include "storage/scratch_pool.h"

#include <iterator>
#include <utility>

#include "storage/flat_view.h"

namespace ds::storage {

at::Tensor ScratchPool::take(int64_t bytes) {
  // The latest first: it is in the cache, and the oldest are the next to go.
  const auto found =
      std::find_if(idle_.rbegin(), idle_.rend(), [&](const Idle& idle) { return bytes_of(idle.memory) == bytes; });
  if (found == idle_.rend()) return {};
  const Idle idle = std::move(*found);
  idle_.erase(std::next(found).base());
  idle_bytes_ -= bytes;
  if (idle.given) idle.given->wait(idle.memory);
  return idle.memory;
}

void ScratchPool::give(const at::Tensor& memory) {
  idle_bytes_ += bytes_of(memory);
  idle_.push_back({memory, Fence::after(memory)});
  trim(limit_);
}

void ScratchPool::trim(int64_t bytes) {
  for (; idle_bytes_ > bytes; idle_.pop_front()) idle_bytes_ -= bytes_of(idle_.front().memory);
}

}  // namespace ds::storage

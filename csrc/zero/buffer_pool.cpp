#include "zero/buffer_pool.h"

#include <ATen/Functions.h>

namespace ds::zero {

at::Tensor BufferPool::take(int64_t numel, const at::TensorOptions& options) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->numel() != numel || it->scalar_type() != options.dtype().toScalarType() || it->device() != options.device())
      continue;
    const at::Tensor found = *it;
    free_.erase(it);
    return found;
  }
  return at::empty({numel}, options);
}

void BufferPool::give(const at::Tensor& buffer) {
  if (buffer.defined()) free_.push_back(buffer);
}

int64_t BufferPool::held_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& buffer : free_) bytes += buffer.numel() * static_cast<int64_t>(buffer.element_size());
  return bytes;
}

}  // namespace ds::zero

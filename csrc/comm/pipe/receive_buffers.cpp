#include "comm/pipe/receive_buffers.h"

#include <ATen/Functions.h>

#include "base/ranges.h"

namespace ds::comm {

at::Tensor ReceiveBuffers::take(at::IntArrayRef sizes, at::ScalarType type) {
  const at::TensorOptions options = at::TensorOptions().dtype(type);
  int64_t bytes = static_cast<int64_t>(options.dtype().itemsize());
  for (const int64_t size : sizes) bytes *= size;
  if (bytes < kSmallest) return at::empty(sizes, options);
  ++calls_;
  const auto free = [](const Kept& one) { return one.storage.use_count() == 1; };  // no tensor has it
  Kept* best = nullptr;
  for (Kept& one : kept_) {
    const auto room = static_cast<int64_t>(one.storage.nbytes());
    if (room < bytes || room > 2 * bytes || !free(one)) continue;
    if (!best || room < static_cast<int64_t>(best->storage.nbytes())) best = &one;
  }
  if (best) {
    best->taken = calls_;
    at::Tensor made = at::empty({0}, options);
    made.set_(best->storage, 0, sizes);
    return made;
  }
  erase_if(kept_, [&](const Kept& one) { return one.taken + kIdle < calls_ && free(one); });
  at::Tensor made = at::empty(sizes, options);
  kept_.push_back({made.storage(), calls_});
  return made;
}

}  // namespace ds::comm

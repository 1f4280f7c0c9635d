// Memory that has been given back and is kept for the next request of the same size: fresh pages cost more than the
// copy into them.
//
// [Note: idle memory]
// Buffers keep exactly the size that was asked for. Above the limit the oldest return to torch's allocator, so that
// gathering a whole model once leaves no whole model behind.
//
// [Note: streams]
// A buffer is given back when the host is through with it; what has been launched on the stream that was current then
// may still read it. A user on that stream is behind that work by itself; a user on another stream waits for it on
// the device.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <deque>

#include "storage/fence.h"

namespace ds::storage {

// One thread at a time.
class ScratchPool {
 public:
  explicit ScratchPool(int64_t limit = 0) : limit_(limit) {}

  // A buffer of exactly `bytes` on the device; undefined if there is none. Its contents are arbitrary.
  at::Tensor take(int64_t bytes, c10::Device device);
  // From torch's allocator where there is none. Keeps room for two of them.
  at::Tensor take(int64_t numel, const at::TensorOptions& options);
  // All memory of a tensor to which nobody else refers; an undefined one is ignored. `ready`: what wrote it on another
  // stream, where nobody has waited for that.
  void give(const at::Tensor& memory, const FencePtr& ready = nullptr);
  // Frees the oldest until at most `bytes` are idle.
  void trim(int64_t bytes = 0);

  int64_t idle_bytes() const { return idle_bytes_; }
  int64_t limit() const { return limit_; }  // of idle bytes
  // Keeps two buffers of `bytes`: of a unit of buffers that are taken together, one is in use and one on its way.
  void keep_two_of(int64_t bytes) { need_room_for(2 * bytes); }
  void need_room_for(int64_t bytes) { limit_ = std::max(limit_, bytes); }

 private:
  struct Idle {
    at::Tensor memory;
    FencePtr given;
  };

  std::deque<Idle> idle_;  // latest last
  int64_t idle_bytes_ = 0;
  int64_t limit_;
};

}  // namespace ds::storage

// Memory that has been given back and waits for who needs as much again: fresh pages cost more than what is copied into
// them.
//
// [Note: what waits here]
// Buffers of exactly the size that was asked for, at most so many bytes of them; what comes beyond that returns to
// torch's allocator, oldest first, so that gathering a whole model once leaves no whole model behind.
//
// [Note: streams]
// A buffer is given back when the host is through with it; what has been launched on the stream that was current then
// may still read it. Who takes it on that stream is behind that by itself, who takes it on another one waits for it on
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
  explicit ScratchPool(int64_t limit) : limit_(limit) {}

  // Undefined where there is none of so many bytes. Contents are whatever was there.
  at::Tensor take(int64_t bytes);
  // Nobody else refers to it.
  void give(const at::Tensor& memory);
  // Frees the oldest until at most so many bytes wait.
  void trim(int64_t bytes = 0);

  int64_t idle_bytes() const { return idle_bytes_; }
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

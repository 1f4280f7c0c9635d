// Memory that has been given back and is kept for the next request: fresh pages cost more than the copy into them.
//
// [Note: idle memory]
// Buffers have exactly the size that was asked for, and serve requests of that size. Above the limit the oldest return
// to torch's allocator, so that gathering a whole model once leaves no whole model behind.
//
// [Note: buffers of any size]
// In a pool of Reuse::kAnySize there is no limit, and a buffer serves every request that is not larger: the smallest
// one that is large enough is taken. Where all are too small, a new one takes the place of the largest of them. So
// there are never more buffers than were taken at one time, and none is larger than the largest request. Requests that
// are the same again and again, as those of each backward, soon find all buffers large enough.
//
// [Note: streams]
// A buffer is given back when the host is through with it; what has been launched on the stream that was current then
// may still read it. A user on that stream is behind that work by itself; a user on another stream waits for it on
// the device.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <deque>

#include "storage/fence.h"

namespace ds::storage {

// A buffer that has been given back serves no request, requests of its size, or all that are not larger.
enum class Reuse : uint8_t { kNone, kSameSize, kAnySize };

// One thread at a time.
class ScratchPool {
 public:
  // `limit`: of idle bytes, of a pool of Reuse::kSameSize.
  explicit ScratchPool(int64_t limit = 0, Reuse reuse = Reuse::kSameSize)
      : reuse_(reuse), limit_(reuse == Reuse::kAnySize ? INT64_MAX : limit) {}

  // A buffer of `bytes` on the device, or of more where sizes need not be the same; undefined if there is none. Its
  // contents are arbitrary.
  at::Tensor take(int64_t bytes, c10::Device device);
  // From torch's allocator where there is none. Keeps room for two of them.
  at::Tensor take(int64_t numel, const at::TensorOptions& options);
  // Takes back all memory of a tensor to which nobody else refers. An undefined tensor is ignored.
  // A pool of Reuse::kNone ignores all of them.
  // `ready`: what wrote it on another stream, where nobody has waited for that.
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

  Idle remove(std::deque<Idle>::iterator position);

  const Reuse reuse_;
  std::deque<Idle> idle_;  // latest last
  int64_t idle_bytes_ = 0;
  int64_t limit_;
};

}  // namespace ds::storage

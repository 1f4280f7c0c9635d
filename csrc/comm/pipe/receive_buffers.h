// Host memory of messages that are received again and again. A page that the kernel hands out anew costs several times
// what copying into it does, so memory of tensors that nobody holds any more is taken for the next ones.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ds::comm {

class ReceiveBuffers {
 public:
  static constexpr int64_t kSmallest = 64 * 1024;  // bytes: below, the allocator does it
  static constexpr int64_t kIdle = 64;             // calls of take() after which an unused one is freed

  // A contiguous tensor on the host, not filled.
  at::Tensor take(at::IntArrayRef sizes, at::ScalarType type);
  int64_t held() const { return static_cast<int64_t>(kept_.size()); }

 private:
  struct Kept {
    at::Storage storage;
    int64_t taken;  // in which call
  };
  std::vector<Kept> kept_;
  int64_t calls_ = 0;
};

}  // namespace ds::comm

// Orders what a device does with memory that goes from one owner to the next.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <memory>
#include <vector>

#include "base/ranges.h"

namespace ds::storage {

// Whether work on the device is done when a call returns: the CPU, and the meta device, which has none to do.
inline bool done_on_return(const c10::Device& device) { return device.is_cpu() || device.is_meta(); }

// A point in the work of one stream.
class Fence {
 public:
  // The point after the work that has been launched on the current stream of the memory's device. Null where work is
  // done when a call returns.
  static std::shared_ptr<const Fence> after(const at::Tensor& memory) {
    if (done_on_return(memory.device())) return nullptr;
    return std::make_shared<const Fence>(memory);
  }
  explicit Fence(const at::Tensor& memory)
      : stream_(c10::impl::VirtualGuardImpl(memory.device().type()).getStream(memory.device())),
        reached_(memory.device().type()) {
    reached_.record(stream_);
    c10::impl::VirtualGuardImpl(memory.device().type()).recordDataPtrOnStream(memory.storage().data_ptr(), stream_);
  }

  c10::Stream stream() const { return stream_; }

  // The current stream goes on after that; the host does not wait. torch's allocator learns of the stream: it reuses
  // memory in the order of the stream alone that it was made on.
  void wait(const at::Tensor& memory) const {
    const c10::impl::VirtualGuardImpl device(memory.device().type());
    const c10::Stream now = device.getStream(memory.device());
    if (now == stream_) return;
    reached_.block(now);
    device.recordDataPtrOnStream(memory.storage().data_ptr(), now);
  }

 private:
  const c10::Stream stream_;
  c10::Event reached_;
};
using FencePtr = std::shared_ptr<const Fence>;

// The same where nobody could be told of a device that has failed: the next work on it says so.
inline FencePtr fence_after(const at::Tensor& memory) noexcept {
  try {
    return Fence::after(memory);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// The current stream goes on after all that has been launched on `other` until now; the host does not wait.
inline void wait_for(const c10::Stream& other, const at::Tensor& memory) {
  const c10::impl::VirtualGuardImpl device(memory.device().type());
  const c10::Stream now = device.getStream(memory.device());
  if (now == other) return;
  c10::Event reached(memory.device().type());
  reached.record(other);
  reached.block(now);
  device.recordDataPtrOnStream(memory.storage().data_ptr(), now);
}

// torch's allocator learns that the current stream has used this memory, which may have been made on another one.
inline void used_here(const at::Tensor& memory) noexcept {
  if (done_on_return(memory.device())) return;
  const c10::impl::VirtualGuardImpl device(memory.device().type());
  try {
    device.recordDataPtrOnStream(memory.storage().data_ptr(), device.getStream(memory.device()));
  } catch (const std::exception&) {  // a device that has failed: the next work on it says so
  }
}

// The latest work of several streams on some memory.
class Fences {
 public:
  void add(const FencePtr& fence) {
    if (!fence) return;
    const auto same = [&](const FencePtr& other) { return other->stream() == fence->stream(); };
    erase_if(all_, same);
    all_.push_back(fence);
  }
  void wait(const at::Tensor& memory) const {
    for (const FencePtr& fence : all_) fence->wait(memory);
  }

 private:
  std::vector<FencePtr> all_;
};

}  // namespace ds::storage

// Memory of gathered parameters, kept between uses: fresh pages cost more than what is copied into them.
//
// [Note: what waits here]
// No more than two units of the largest layer: one that is in use and one that is on its way. What is given back beyond
// that returns to torch's allocator, oldest first, so that gathering a whole model once leaves no whole model behind.
//
// [Note: streams]
// A buffer is given back when the host is through with it; what has been launched on the stream that was current then
// may still read it. Who takes it on that stream is behind that by itself, who takes it on another one waits for it on
// the device. torch's allocator learns of the second stream, too: it reuses memory in the order of the first one alone.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <deque>
#include <optional>

namespace ds::zero {

class BufferPool {
 public:
  at::Tensor take(int64_t numel, const at::TensorOptions& options);
  void give(const at::Tensor& buffer);  // nobody else refers to it; an undefined one is ignored
  void clear() { idle_.clear(); }
  int64_t held_bytes() const;
  // Buffers of so many bytes are taken together: a unit. Without units every buffer is one.
  void need_room_for(int64_t unit_bytes) { largest_ = std::max(largest_, unit_bytes); }

 private:
  struct Idle {
    at::Tensor memory;
    std::optional<c10::Stream> given_on;  // nothing on the CPU, where work is done when it returns
    std::optional<c10::Event> done;
  };

  std::deque<Idle> idle_;  // latest last
  int64_t largest_ = 0;    // bytes of a unit or of a single buffer
};

}  // namespace ds::zero

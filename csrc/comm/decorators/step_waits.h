// The time for which steps of an engine wait for communication: that of its thread, and of its device's stream.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/step_clock.h"
#include "comm/calls/event_pool.h"

namespace ds::comm {

// The clock counts what blocks the thread. A device runs behind its host, so that events on the current stream, one
// before and one after each wait, say for how long that has stood still.
class StepWaits {
 public:
  // The CPU has no streams: there are no events.
  StepWaits(StepClockPtr clock, c10::Device device)
      : clock_(std::move(clock)), device_(device), events_(device.type(), c10::EventFlag::BACKEND_DEFAULT) {}
  StepWaits(const StepWaits&) = delete;

  StepClock& clock() { return *clock_; }

  // Around each wait of the current stream. One inside of another belongs to that.
  void begin() noexcept;
  void end() noexcept;

  // The waits so far are those of the step that ends here.
  void end_step();
  // Seconds of the waits of steps that have ended, as far as the device has passed them; no wait is told twice, and the
  // host waits for nothing. Null on the CPU, and where events tell no time: before torch 2.4, on some devices.
  std::optional<double> take();

 private:
  using Pair = std::pair<c10::Event, c10::Event>;
  std::optional<c10::Event> now() noexcept;  // null: the device has failed, as the next work on it says

  const StepClockPtr clock_;
  const c10::Device device_;
  EventPool events_;  // that tell the time
  std::mutex mutex_;  // of what follows
  int depth_ = 0;
  std::optional<c10::Event> begun_;
  std::vector<Pair> pairs_, ended_;  // of this step, and of those before
};
using StepWaitsPtr = std::shared_ptr<StepWaits>;

}  // namespace ds::comm

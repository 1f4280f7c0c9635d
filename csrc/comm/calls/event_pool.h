// Events of a device that are used again, because making and destroying one costs a call of the driver each.
#pragma once
#include <c10/core/Event.h>

#include <mutex>
#include <utility>
#include <vector>

namespace ds::comm {

// Any thread may use it.
class EventPool {
 public:
  explicit EventPool(c10::DeviceType device, c10::EventFlag flag = c10::EventFlag::PYTORCH_DEFAULT)
      : device_(device), flag_(flag) {}
  EventPool(const EventPool&) = delete;

  // An event that the caller records.
  c10::Event take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        c10::Event event = std::move(free_.back());
        free_.pop_back();
        return event;
      }
    }
    return c10::Event(device_, flag_);
  }
  // No later call waits for it or asks it.
  void give(c10::Event event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(event));
  }

 private:
  const c10::DeviceType device_;
  const c10::EventFlag flag_;
  std::mutex mutex_;
  std::vector<c10::Event> free_;
};

}  // namespace ds::comm

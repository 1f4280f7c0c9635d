#include "comm/decorators/call_log.h"

#include <utility>

namespace ds::comm {

void CallLog::turn(bool on, Caller caller) {
  const std::lock_guard lock(mutex_);
  caller_ = std::move(caller);
  on_ = on;
}

std::string CallLog::caller() const {
  Caller asked;
  {
    const std::lock_guard lock(mutex_);
    asked = caller_;
  }
  return asked ? asked() : "";
}

void CallLog::add(LoggedCall call) {
  const std::lock_guard lock(mutex_);
  calls_.push_back(std::move(call));
}

std::vector<LoggedCall> CallLog::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(calls_, {});
}

bool CallLog::enter(std::thread::id thread) {
  const std::lock_guard lock(mutex_);
  return depth_[thread]++ == 0;
}

void CallLog::leave(std::thread::id thread) {
  const std::lock_guard lock(mutex_);
  const auto here = depth_.find(thread);
  if (here != depth_.end() && --here->second <= 0) depth_.erase(here);
}

}  // namespace ds::comm

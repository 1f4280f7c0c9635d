// Keeps masters and optimizer states as they are while somebody copies them.
#pragma once
#include <condition_variable>
#include <mutex>

namespace ds::zero {

// The copying thread may be another one than the thread that holds. Who changes states, or hands out memory in which
// somebody could, waits first.
class StateHold {
 public:
  void hold() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++holders_;
  }
  void let_go() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      --holders_;
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return holders_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int holders_ = 0;
};

}  // namespace ds::zero

#include "comm/boards/watch.h"

#include <unistd.h>

#include <algorithm>

namespace ds::comm {

void Watch::add(std::weak_ptr<Watched> group) {
  std::lock_guard<std::mutex> lock(mutex_);
  groups_.erase(std::remove_if(groups_.begin(), groups_.end(), [](const auto& each) { return each.expired(); }),
                groups_.end());
  groups_.push_back(std::move(group));
  if (ending_ || pid_ == getpid()) return;
  if (thread_.joinable()) thread_.detach();  // it stayed in the parent
  pid_ = getpid();
  thread_ = std::thread([this] { serve(); });
}

std::vector<std::shared_ptr<Watched>> Watch::groups() const {
  std::vector<std::shared_ptr<Watched>> found;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& each : groups_)
    if (auto group = each.lock()) found.push_back(std::move(group));
  return found;
}

void Watch::stop() {
  if (thread_.joinable() &&
      pid_ != getpid()) {  // a forked child: the thread stayed in the parent, perhaps with the lock
    thread_.detach();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watch::serve() {
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, std::chrono::milliseconds(100), [this] { return ending_; });
      if (ending_) return;
    }
    for (const auto& group : groups()) group->look(callbacks_);
  }
}

}  // namespace ds::comm

// The lock that all parts of a ShardStorage share.
#pragma once
#include <mutex>

#include "base/blocking_region.h"
#include "base/condition_variable.h"

namespace ds::storage {

class StorageLock {
 public:
  using Held = std::unique_lock<std::mutex>;

  Held hold() { return locked(mutex_); }
  // Until anything changes: blocks, the memory that is used, jobs in the background.
  void wait(Held& held) {
    ++waiting_;
    in_blocking_region([&] { changed_.wait(held); });
    --waiting_;
  }
  // With the lock.
  void changed() {
    if (waiting_ > 0) changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  ConditionVariable changed_;
  int waiting_ = 0;
};

}  // namespace ds::storage

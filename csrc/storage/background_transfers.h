// Transfers of blocks in the background: jobs that are not done yet, and failures that nobody has been told of.
#pragma once
#include <functional>
#include <vector>

#include "storage/failure.h"
#include "storage/storage_lock.h"
#include "storage/transfer_threads.h"

namespace ds::storage {

class BackgroundTransfers {
 public:
  // `at_once`: run() returns when the job is done. Throws ErrorKind::kValue for a number of threads below 1 or
  // above 64.
  BackgroundTransfers(StorageLock& lock, int threads, bool at_once);

  // With the lock: settle() waits for one more job, until end() is called.
  void begin() { ++jobs_; }
  void end() { --jobs_; }
  void failed(const FailurePtr& failure) { failures_.push_back(failure); }
  // Without the lock. The caller's own thread does the job where no thread can be started.
  void run(const std::function<void()>& job) noexcept;
  void settle();

 private:
  StorageLock& lock_;
  int jobs_ = 0;
  std::vector<FailurePtr> failures_;
  TransferThreads threads_;
};

}  // namespace ds::storage

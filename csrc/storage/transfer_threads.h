// Threads that move blocks while the caller does something else.
#pragma once
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/condition_variable.h"
#include "base/process.h"

namespace ds::storage {

// Started with the first job. Destruction does all jobs first, except in a forked child, which has no threads: there
// add() does the job itself, as with 0 threads.
class TransferThreads {
 public:
  explicit TransferThreads(int threads) : wanted_(threads) {}
  ~TransferThreads();
  TransferThreads(const TransferThreads&) = delete;
  TransferThreads& operator=(const TransferThreads&) = delete;

  // Jobs do not throw. Any thread.
  void add(std::function<void()> job);

 private:
  void run();

  const int wanted_;
  const OwningProcess owner_;
  std::mutex lock_;
  ConditionVariable changed_;
  std::deque<std::function<void()>> jobs_;
  int idle_ = 0;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace ds::storage

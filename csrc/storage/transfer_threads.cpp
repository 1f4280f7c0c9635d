#include "storage/transfer_threads.h"

#include <utility>

namespace ds::storage {

TransferThreads::~TransferThreads() {
  if (!owner_.here()) {
    for (std::thread& thread : threads_) thread.detach();
    return;
  }
  {
    const std::lock_guard guard(lock_);
    ending_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void TransferThreads::add(std::function<void()> job) {
  if (wanted_ == 0 || !owner_.here()) return job();
  {
    const std::lock_guard guard(lock_);
    jobs_.push_back(std::move(job));
    if (static_cast<int>(jobs_.size()) > idle_ && static_cast<int>(threads_.size()) < wanted_)
      threads_.emplace_back([this] { run(); });
  }
  changed_.notify_one();
}

void TransferThreads::run() {
  std::unique_lock guard(lock_);
  for (;;) {
    ++idle_;
    changed_.wait(guard, [this] { return ending_ || !jobs_.empty(); });
    --idle_;
    if (jobs_.empty()) return;
    const std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    guard.unlock();
    job();
    guard.lock();
  }
}

}  // namespace ds::storage

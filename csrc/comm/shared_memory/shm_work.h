// The handle that communicators through shared memory return.
#pragma once
#include "base/cores.h"
#include "comm/communicator.h"
#include "comm/shared_memory/shm_queue.h"

namespace ds::comm {

class ShmWork : public Work {
 public:
  ShmWork(std::shared_ptr<ShmQueue> queue, ShmQueue::TaskPtr task) : queue_(std::move(queue)), task_(std::move(task)) {}
  void wait() override {
    if (task_->done() && !task_->error()) return;
    queue_->complete(task_);
  }
  bool ready() override { return task_->done(); }

 private:
  std::shared_ptr<ShmQueue> queue_;
  ShmQueue::TaskPtr task_;
};

// Without spare cores a background thread would only take turns with the computation. A collective then runs in the
// thread that waits for it.
inline bool has_spare_cores(int ranks) { return usable_cores() > ranks; }

}  // namespace ds::comm

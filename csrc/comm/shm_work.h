// What communicators through shared memory have in common.
#pragma once
#include "base/cores.h"
#include "comm/communicator.h"
#include "comm/shm_queue.h"

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

// Where every rank has a core of its own and no more, a thread in the background would only take turns with the
// computation: the collective then runs when somebody waits for it.
inline bool has_spare_cores(int ranks) { return usable_cores() > ranks; }

}  // namespace ds::comm

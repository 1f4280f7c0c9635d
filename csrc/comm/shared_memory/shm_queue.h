// The collectives of one rank in the order of their calls, each run by whoever gets to it first: the thread that waits
// for it, or, for those that nobody waits for yet, a thread in the background.
#pragma once
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/condition_variable.h"
#include "comm/shared_memory/shm_group.h"

namespace ds::comm {

class ShmQueue {
 public:
  // background: whether a core is free for a thread that runs collectives while this rank computes.
  ShmQueue(std::unique_ptr<ShmGroup> group, bool background);
  ~ShmQueue();  // runs what is left; gives up on ranks that do not come

  class Task {
   public:
    bool done() const { return done_.load(std::memory_order_acquire); }
    std::exception_ptr error() const { return error_; }  // once done

   private:
    friend class ShmQueue;
    std::function<void(ShmGroup&)> run_;
    std::function<void(std::exception_ptr)> after_;
    std::exception_ptr error_;
    Clock::time_point due_;  // when the background may take it
    std::atomic<bool> done_{false};
  };
  using TaskPtr = std::shared_ptr<Task>;

  // The thread that runs a task: one that waits for it, or the background thread. The background thread starts at once,
  // or, if the caller is likely to wait anyway, within a fraction of a millisecond, because waking a thread costs more
  // than a small collective.
  enum class Start { kByWaiting, kSoon, kPerhapsLater };
  // `after` is called when it has run, by who ran it.
  TaskPtr submit(std::function<void(ShmGroup&)> run, Start start,
                 std::function<void(std::exception_ptr)> after = nullptr);
  void complete(const TaskPtr& task);  // on return it has run; throws what it threw
  // Sees to it that all submitted tasks run, here or in the background. Is called before this rank waits for another
  // rank by other means, because that rank may wait for this one in one of the tasks.
  void progress();
  bool background() const { return background_; }
  ShmGroup& group() { return *group_; }

 private:
  bool run_next();       // false: there was none; needs running_
  bool due() const;      // the first task is one for the background, now; needs mutex_
  void start_serving();  // needs mutex_
  void serve();

  std::unique_ptr<ShmGroup> group_;
  const int64_t pid_;
  const bool background_;
  std::mutex running_;  // one collective at a time
  std::mutex mutex_;    // of all below
  ConditionVariable changed_;
  std::deque<TaskPtr> waiting_;
  size_t for_thread_ = 0;  // the first tasks among them: the thread is to run them
  bool ending_ = false;
  bool asleep_ = false;  // the thread: until somebody wakes it
  std::thread thread_;
};

}  // namespace ds::comm

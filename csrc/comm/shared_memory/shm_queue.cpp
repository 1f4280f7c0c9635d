#include "comm/shared_memory/shm_queue.h"

#include <unistd.h>

#include "base/blocking_region.h"
#include "base/clock.h"

namespace ds::comm {

namespace {

constexpr std::chrono::microseconds kNap(200);
constexpr int kNaps = 25;

}  // namespace

ShmQueue::ShmQueue(std::unique_ptr<ShmGroup> group, bool background)
    : group_(std::move(group)), pid_(getpid()), background_(background) {}

ShmQueue::~ShmQueue() {
  if (getpid() != pid_) {  // a forked child: the thread is not in it, and the collectives are not its own
    if (thread_.joinable()) thread_.detach();
    return;
  }
  group_->channel().set_timeout(std::chrono::seconds(2));
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  // A task that ends may hold the last reference to a tensor of Python's, which goes only with the interpreter's lock.
  in_blocking_region([this] {
    if (thread_.joinable()) thread_.join();
    const auto running = locked(running_);
    while (run_next()) {
    }
  });
}

ShmQueue::TaskPtr ShmQueue::submit(std::function<void(ShmGroup&)> run, Start start,
                                   std::function<void(std::exception_ptr)> after) {
  auto task = std::make_shared<Task>();
  task->run_ = std::move(run);
  task->after_ = std::move(after);
  if (start == Start::kPerhapsLater) task->due_ = Clock::now() + kNap;
  std::lock_guard lock(mutex_);
  waiting_.push_back(task);
  if (start != Start::kByWaiting) {
    start_serving();
    if (start == Start::kSoon || asleep_) changed_.notify_one();
  }
  return task;
}

void ShmQueue::start_serving() {
  for_thread_ = waiting_.size();  // tasks run in the order of their calls
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
}

bool ShmQueue::run_next() {
  TaskPtr task;
  {
    std::lock_guard lock(mutex_);
    if (waiting_.empty()) return false;
    task = std::move(waiting_.front());
    waiting_.pop_front();
    if (for_thread_ > 0) --for_thread_;
  }
  try {
    task->run_(*group_);
  } catch (...) {
    task->error_ = std::current_exception();
  }
  task->run_ = nullptr;  // lets go of its tensors
  const auto after = std::move(task->after_);
  task->done_.store(true, std::memory_order_release);
  if (after) after(task->error_);
  return true;
}

void ShmQueue::complete(const TaskPtr& task) {
  while (!task->done()) {
    const auto running = locked(running_);
    if (!task->done()) run_next();
  }
  if (task->error_) std::rethrow_exception(task->error_);
}

void ShmQueue::progress() {
  if (background_) {
    std::lock_guard lock(mutex_);
    if (waiting_.empty()) return;
    start_serving();
    return changed_.notify_one();
  }
  const auto running = locked(running_);
  while (run_next()) {
  }
}

bool ShmQueue::due() const { return for_thread_ > 0 && (ending_ || waiting_.front()->due_ <= Clock::now()); }

void ShmQueue::serve() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      // While collectives come in quick succession the thread only dozes, and nobody has to wake it.
      for (int naps = 0; naps < kNaps && !due() && !ending_; ++naps) {
        changed_.wait_for(lock, kNap);
        if (for_thread_ > 0) naps = 0;
      }
      asleep_ = for_thread_ == 0;
      changed_.wait(lock, [this] { return for_thread_ > 0 || ending_; });
      asleep_ = false;
      if (for_thread_ == 0) return;
      if (!due()) continue;
    }
    const auto running = locked(running_);
    bool mine;
    {
      std::lock_guard lock(mutex_);
      mine = due();  // somebody may have been faster
    }
    if (mine) run_next();
  }
}

}  // namespace ds::comm

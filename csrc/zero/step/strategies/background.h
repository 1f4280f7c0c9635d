// Work on a thread beside the training, in order.
#pragma once
#include <functional>
#include <future>
#include <memory>
#include <utility>

#include "storage/transfer_threads.h"
#include "zero/rank_failures.h"

namespace ds::zero {

class Background {
 public:
  // The work is destroyed when it has run, with everything that it holds. last() keeps only the outcome, so the work
  // may hold an object that keeps last().
  void run(std::function<void()> work) {
    const auto task = std::make_shared<std::packaged_task<void()>>(
        [work = std::move(work)]() mutable { run_beside(std::exchange(work, nullptr)); });
    last_ = task->get_future().share();
    thread_.add([task] { (*task)(); });
  }
  std::shared_future<void> last() const { return last_; }
  // For the last work. Throws what it threw, an io::FileError or a LoneFailure, each time.
  void wait() const {
    if (last_.valid()) last_.get();
  }

 private:
  std::shared_future<void> last_;
  storage::TransferThreads thread_{1};
};

}  // namespace ds::zero

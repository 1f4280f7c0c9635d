// The forwards that a backward has reached: micro-batches whose gradients count. Evaluation, and forwards that raised or were
// run again, are not among them.
#pragma once
#include <cstdint>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace ds::zero {

class ReachedForwards {
 public:
  // Returns the number of a new forward; the first one has number 1.
  int64_t add() { return ++forwards_; }

  // The backward that runs has come to an output of this forward. Hooks may call it from one thread per device.
  void reach(int64_t forward) {
    const std::lock_guard<std::mutex> lock(mutex_);
    reaching_.insert(forward);
  }
  // The backward has ended.
  void keep() {
    const std::lock_guard<std::mutex> lock(mutex_);
    reached_.merge(std::exchange(reaching_, {}));
  }
  // The backward has raised: it reached none.
  void forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    reaching_.clear();
  }
  // The numbers since the last call, in order.
  std::vector<int64_t> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::set<int64_t> taken = std::exchange(reached_, {});
    return {taken.begin(), taken.end()};
  }

 private:
  int64_t forwards_ = 0;
  std::mutex mutex_;
  std::set<int64_t> reached_, reaching_;
};

}  // namespace ds::zero

#include "io/async/transfer_queue.h"

#include <utility>

#include "base/error.h"

namespace ds::io {

struct TransferQueue::Ticket::State {
  Request request;
  bool counted = false;
  std::mutex lock;
  ConditionVariable changed;
  size_t parts_left = 0;
  bool ended = false;
  std::exception_ptr error;
};

void TransferQueue::Ticket::wait() const {
  std::unique_lock guard(state_->lock);
  state_->changed.wait(guard, [this] { return state_->ended; });
  if (state_->error) std::rethrow_exception(state_->error);
}

TransferQueue::TransferQueue(int threads) : threads_(threads) {
  if (threads < 1 || threads > 1024) {
    fail(ErrorKind::kValue, "intra_op_parallelism must be from 1 to 1024, got ", threads);
  }
}

TransferQueue::~TransferQueue() {
  if (!owner_.here()) {  // a fork: the threads are the parent's
    for (std::thread& worker : workers_) worker.detach();
    return;
  }
  {
    std::lock_guard guard(lock_);
    ending_ = true;
  }
  added_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void TransferQueue::start_threads() {
  if (!owner_.here()) {
    fail(ErrorKind::kRuntime,
         "this handle was made before the process was forked, and its threads are the parent's: "
         "make another handle in the child");
  }
  if (!workers_.empty()) return;
  for (int i = 0; i < threads_; ++i) workers_.emplace_back([this] { work(); });
}

TransferQueue::StatePtr TransferQueue::add(Request request, bool counted) {
  auto state = std::make_shared<Ticket::State>();
  auto parts = parts_of(request.offset, request.bytes, threads_);
  if (parts.empty()) parts.emplace_back(request.offset, 0);
  const uint64_t offset = request.offset;
  state->request = std::move(request);
  state->counted = counted;
  state->parts_left = parts.size();
  {
    std::lock_guard guard(lock_);
    start_threads();
    for (const auto& [begin, bytes] : parts) waiting_.push_back({state, begin - offset, bytes});
    if (counted) {
      ++counted_;
      ++on_the_way_;
    }
  }
  if (parts.size() == 1) {
    added_.notify_one();
  } else {
    added_.notify_all();
  }
  return state;
}

void TransferQueue::run(Request request, bool alone) {
  if (threads_ > 1 && !alone) return Ticket(add(std::move(request), false)).wait();
  request.move(0, request.bytes);
  if (request.after) request.after();
}

TransferQueue::Ticket TransferQueue::start(Request request, bool counted) {
  return Ticket(add(std::move(request), counted));
}

void TransferQueue::work() {
  std::unique_lock guard(lock_);
  for (;;) {
    added_.wait(guard, [this] { return ending_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    Work now = std::move(waiting_.front());
    waiting_.pop_front();
    guard.unlock();
    std::exception_ptr error;
    try {
      now.operation->request.move(now.begin, now.bytes);
    } catch (...) {
      error = std::current_exception();
    }
    end_part(now.operation, error);
    now = {};
    guard.lock();
  }
}

void TransferQueue::end_part(const StatePtr& operation, std::exception_ptr error) {
  {
    std::lock_guard guard(operation->lock);
    if (error && !operation->error) operation->error = error;
    if (--operation->parts_left > 0) return;
  }
  if (!operation->error && operation->request.after) {
    try {
      operation->request.after();
    } catch (...) {
      operation->error = std::current_exception();
    }
  }
  operation->request = {};  // memory and files are the caller's again before it learns so
  error = operation->error;
  {
    std::lock_guard guard(operation->lock);
    operation->ended = true;
  }
  operation->changed.notify_all();
  if (!operation->counted) return;
  {
    std::lock_guard guard(lock_);
    --on_the_way_;
    if (error && !error_) error_ = error;
  }
  ended_.notify_all();
}

int64_t TransferQueue::wait() {
  std::unique_lock guard(lock_);
  if (counted_ > 0 && !owner_.here()) {
    fail(ErrorKind::kRuntime, "what this handle transfers ends in the process that made it, not in its fork");
  }
  ended_.wait(guard, [this] { return on_the_way_ == 0; });
  const std::exception_ptr error = std::exchange(error_, nullptr);
  const int64_t ended = std::exchange(counted_, 0);
  if (error) std::rethrow_exception(error);
  return ended;
}

int64_t TransferQueue::pending() const {
  std::lock_guard guard(lock_);
  return counted_;
}

}  // namespace ds::io

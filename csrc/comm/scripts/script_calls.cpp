#include "comm/scripts/script_calls.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <exception>
#include <optional>
#include <utility>

#include "base/blocking_region.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/ranges.h"
#include "comm/decorators/logged.h"

namespace ds::comm {

namespace {

using Tensors = std::vector<at::Tensor>;
using Future = c10::ivalue::Future;

constexpr std::chrono::microseconds kPoll(200);  // how often a wait with a timeout asks

// The device of results that a stream computes; none: the results are there when the work's wait() returns.
std::optional<c10::Device> stream_device(const Tensors& results) {
  if (results.empty() || !asynchronous(results[0].device())) return std::nullopt;
  return results[0].device();
}

// A call under way, for its handle and its future. One thread at a time waits for the core's work, without the mutex:
// to wait, or to release tensors, may need a lock that another thread has. On a device with streams the end of the call
// means that the work is on a stream; an event orders every stream that waits behind it.
class PendingCall {
 public:
  PendingCall(WorkPtr work, Tensors results)
      : work_(std::move(work)), device_(stream_device(results)), results_(std::move(results)) {}

  bool completed() {
    {
      const std::lock_guard lock(mutex_);
      if (done_ || taken_ || !work_->ready()) return done_ && (!finished_ || finished_->query());
      taken_ = true;
    }
    end();
    return !finished_ || finished_->query();
  }

  void wait(milliseconds timeout) {
    const bool limited = timeout.count() > 0;
    const auto deadline = Clock::now() + timeout;
    std::unique_lock lock(mutex_);
    while (!done_) {
      if (!taken_ && (!limited || work_->ready())) {
        taken_ = true;
        lock.unlock();
        end();
        lock.lock();
      } else if (!limited) {
        changed_.wait(lock);
      } else if (Clock::now() > deadline) {
        fail(ErrorKind::kRuntime, "Operation timed out!");
      } else {
        changed_.wait_for(lock, kPoll);
      }
    }
    if (error_) std::rethrow_exception(error_);
    if (finished_) finished_->block(current_stream());
  }

  void wait_for_any_end() {
    try {
      wait(milliseconds(0));
    } catch (...) {  // the future has it
      return;
    }
  }

  bool succeeded() const {
    const std::lock_guard lock(mutex_);
    return done_ && !error_;
  }
  std::exception_ptr error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  const Tensors& results() const { return results_; }

  // And whether somebody has to wait for the call now.
  std::pair<c10::intrusive_ptr<Future>, bool> future() {
    {
      const std::lock_guard lock(mutex_);
      if (future_) return {future_, false};
      const auto type = c10::ListType::create(c10::TensorType::get());
      future_ = device_ ? c10::make_intrusive<Future>(type, std::vector<c10::Device>{*device_})
                        : c10::make_intrusive<Future>(type);
      if (!done_ && !device_) return {future_, true};
    }
    if (device_) {
      settle_on_a_stream();
    } else {
      settle(*future_);
    }
    return {future_, false};
  }

 private:
  c10::Stream current_stream() const { return c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_); }

  // torch's futures of a device are complete when the work is on a stream, and record that stream. A stream of its own
  // keeps the caller's current stream free of the wait.
  void settle_on_a_stream() {
    const c10::impl::VirtualGuardImpl guard(device_->type());
    const c10::Stream before = guard.exchangeStream(guard.getStreamFromGlobalPool(*device_));
    wait_for_any_end();
    settle(*future_);
    guard.exchangeStream(before);
  }

  void end() {
    std::exception_ptr error;
    try {
      work_->wait();
      if (device_) {
        finished_.emplace(device_->type());
        finished_->record(current_stream());
      }
    } catch (...) {
      error = std::current_exception();
    }
    work_.reset();
    c10::intrusive_ptr<Future> asked;
    {
      const std::lock_guard lock(mutex_);
      error_ = error;
      done_ = true;
      asked = future_;
    }
    changed_.notify_all();
    if (asked && !device_) settle(*asked);
  }

  void settle(Future& future) const { error_ ? future.setError(error_) : future.markCompleted(c10::IValue(results_)); }

  mutable std::mutex mutex_;  // of what follows; who has set taken_ alone uses work_
  ConditionVariable changed_;
  bool taken_ = false, done_ = false;
  WorkPtr work_;
  std::exception_ptr error_;
  c10::intrusive_ptr<Future> future_;
  const std::optional<c10::Device> device_;
  std::optional<c10::Event> finished_;  // written before done_
  const Tensors results_;
};

class ScriptWork : public c10d::Work {
 public:
  // `sender`: of a receive; null: another call.
  ScriptWork(c10d::OpType type, std::shared_ptr<PendingCall> call, std::shared_ptr<FutureThread> futures,
             std::shared_ptr<int> sender)
      : c10d::Work(-1, type), call_(std::move(call)), futures_(std::move(futures)), sender_(std::move(sender)) {}

  bool isCompleted() override {  // torch calls it with the interpreter's lock
    bool completed = false;
    in_blocking_region([&] { completed = call_->completed(); });
    return completed;
  }
  bool isSuccess() const override { return call_->succeeded(); }
  std::exception_ptr exception() const override { return call_->error(); }
  bool wait(milliseconds timeout) override {
    call_->wait(timeout);
    return true;
  }
  void synchronize() override {}
  int sourceRank() const override { return sender_ ? *sender_ : c10d::Work::sourceRank(); }
  Tensors result() override { return call_->results(); }
  c10::intrusive_ptr<Future> getFuture() override {
    const auto [future, waited_for] = call_->future();
    if (waited_for) futures_->add([call = call_] { call->wait_for_any_end(); });
    return future;
  }

 private:
  const std::shared_ptr<PendingCall> call_;
  const std::shared_ptr<FutureThread> futures_;
  const std::shared_ptr<int> sender_;
};

c10d::OpType op_type(const ListCall& call) {
  switch (call.verb) {
    case Verb::kAllReduce: return c10d::OpType::ALLREDUCE;
    case Verb::kReduce: return c10d::OpType::REDUCE;
    case Verb::kBroadcast: return c10d::OpType::BROADCAST;
    case Verb::kReduceScatter:
      return call.in.size() == 1 ? c10d::OpType::_REDUCE_SCATTER_BASE : c10d::OpType::REDUCE_SCATTER;
    case Verb::kAllGather: return call.out.size() == 1 ? c10d::OpType::_ALLGATHER_BASE : c10d::OpType::ALLGATHER;
    case Verb::kAllToAll: return call.out.size() == 1 ? c10d::OpType::ALLTOALL_BASE : c10d::OpType::ALLTOALL;
    case Verb::kGather: return c10d::OpType::GATHER;
    case Verb::kScatter: return c10d::OpType::SCATTER;
    case Verb::kSend: return c10d::OpType::SEND;
    case Verb::kRecv: return c10d::OpType::RECV;
    case Verb::kBarrier: return c10d::OpType::BARRIER;
    default: return c10d::OpType::UNKNOWN;
  }
}

}  // namespace

FutureThread::~FutureThread() {
  if (!thread_.joinable()) return;
  bool idle = false;
  if (owner_.here()) {  // else it is the parent's
    const std::lock_guard lock(queue_->mutex);
    queue_->ending = true;
    idle = !queue_->busy && queue_->waits.empty();
    queue_->changed.notify_all();
  }
  idle ? thread_.join() : thread_.detach();
}

void FutureThread::add(std::function<void()> wait) {
  const std::lock_guard lock(queue_->mutex);
  queue_->waits.push_back(std::move(wait));
  if (!thread_.joinable()) thread_ = std::thread([queue = queue_] { serve(queue); });
  queue_->changed.notify_one();
}

void FutureThread::serve(const std::shared_ptr<Queue>& queue) {
  std::unique_lock lock(queue->mutex);
  for (;;) {
    queue->changed.wait(lock, [&] { return !queue->waits.empty() || queue->ending; });
    if (queue->waits.empty()) return;
    auto wait = std::move(queue->waits.front());
    queue->waits.pop_front();
    queue->busy = true;
    lock.unlock();
    wait();
    wait = nullptr;  // the last handle may go with it
    lock.lock();
    queue->busy = false;
  }
}

c10::intrusive_ptr<c10d::Work> ScriptCalls::run(ListCall call) {
  if (call.verb == Verb::kRecv && call.detached) call.sender = std::make_shared<int>(call.peer);
  if (call.detached) return handle({std::move(call)});
  run_call(*communicator_, std::move(call))->wait();
  return {};
}

c10::intrusive_ptr<c10d::Work> ScriptCalls::handle(std::vector<ListCall> calls) {
  const bool detached = !calls.empty() && calls[0].detached;
  const c10d::OpType type = calls.empty() ? c10d::OpType::UNKNOWN : op_type(calls[0]);
  std::shared_ptr<int> sender = calls.empty() ? nullptr : calls[0].sender;
  Tensors results;
  std::vector<WorkPtr> works;
  {
    const std::lock_guard lock(issuing_);
    for (ListCall& each : calls) {
      append(results, each.out);
      works.push_back(run_call(*communicator_, std::move(each)));
    }
  }
  WorkPtr work = works.size() == 1 ? works[0] : std::make_shared<JoinedWork>(std::move(works));
  auto pending = std::make_shared<PendingCall>(std::move(work), std::move(results));
  if (!detached) pending->wait(milliseconds(0));
  return c10::make_intrusive<ScriptWork>(type, std::move(pending), futures_, std::move(sender));
}

}  // namespace ds::comm

// Calls of a script on the ranks of a group, with torch's handles for those that it does not wait for at once.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/condition_variable.h"
#include "base/process.h"
#include "comm/c10d_compat.h"
#include "comm/calls/list_calls.h"

namespace ds::comm {

// Waits for calls in the order in which somebody asked for their futures, so that a future ends although nobody waits
// for its call. Its thread begins with the first of them.
class FutureThread {
 public:
  FutureThread() = default;
  FutureThread(const FutureThread&) = delete;
  ~FutureThread();                       // does not wait for what is left: that goes on and ends by itself
  void add(std::function<void()> wait);  // it throws nothing

 private:
  struct Queue {
    std::mutex mutex;  // of what follows
    ConditionVariable changed;
    std::deque<std::function<void()>> waits;
    bool busy = false, ending = false;
  };
  static void serve(const std::shared_ptr<Queue>& queue);

  const OwningProcess owner_;
  const std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::thread thread_;
};

// Calls are made by one thread at a time; handles may be used by any.
class ScriptCalls {
 public:
  explicit ScriptCalls(CommunicatorPtr communicator) : communicator_(std::move(communicator)) {}

  // A handle when `call` is detached; else null, and it has ended. Of the handle, wait() and is_completed() leave the
  // results in call.out, which are what result() and its future give; it fails with what the call failed with, each
  // time it is asked. wait() with a timeout throws where the call has not ended by then, and the call goes on.
  c10::intrusive_ptr<c10d::Work> run(ListCall call);
  // A handle of all `calls`, which are issued in this order. If they are not detached, they have ended.
  c10::intrusive_ptr<c10d::Work> handle(std::vector<ListCall> calls);

 private:
  std::mutex issuing_;
  const CommunicatorPtr communicator_;
  const std::shared_ptr<FutureThread> futures_ = std::make_shared<FutureThread>();
};

}  // namespace ds::comm

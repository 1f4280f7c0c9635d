// The log of communication calls of a process: what each call was, how large it was, when it began and ended, and for
// how long it blocked a thread. Communicators write into it (logged.h), torch.distributed's own calls do
// (torch_calls.h), and Python adds its verbs. Listeners come and go in any order.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "comm/decorators/step_waits.h"

namespace ds::comm {

inline double seconds_now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

// One finished call.
struct LoggedCall {
  std::string op;          // the name of the function, all_reduce
  std::string caller;      // the function of the script that made it; "" where that is not known
  int64_t bytes = 0;       // that the rank passes to it; of a scatter, that it gets
  int ranks = 0;           // of the group; 0: unknown
  std::string label = {};  // the name that it is recorded under; "": `op`, if such calls are wanted
  std::string tag = {};    // Op::tag
  // The group, by a name that is the same on all its ranks; "": unknown. The number of the call among the collectives
  // of the group is the same on all of them, too; -1: not a collective.
  std::string group = {};
  int64_t number = -1;
  // Seconds on `Clock`: from the call to its end, or to when somebody knew of its end; and for how long a thread made
  // the call or waited for it.
  double begin = 0, end = 0, blocked = 0;
};

// Keeps the calls for somebody who asks.
class CallRecorder {
 public:
  using Caller = std::function<std::string()>;
  // `waits`: each call waits for its end while this listens, so that its time is its own: nothing overlaps. `caller`
  // names the function that makes the current call; null: names are not wanted.
  explicit CallRecorder(bool waits, Caller caller = nullptr) : waits_(waits), caller_(std::move(caller)) {}

  bool waits() const { return waits_; }
  const Caller& caller() const { return caller_; }
  void add(const LoggedCall& call);
  std::vector<LoggedCall> take();  // since the last take, in the order of their ends

 private:
  const bool waits_;
  const Caller caller_;
  std::mutex mutex_;
  std::vector<LoggedCall> calls_;
};

// Its listeners are recorders of calls, and the waits of the steps of engines.
// Costs one comparison for each call while there are none. Any thread may use it.
class CallLog {
 public:
  struct Listeners {
    std::vector<std::shared_ptr<CallRecorder>> recorders;
    std::vector<StepWaitsPtr> steps;
  };
  using ListenersPtr = std::shared_ptr<const Listeners>;

  template <typename Listener>
  void add(const Listener& listener) {
    change(listener, true);
  }
  template <typename Listener>
  void remove(const Listener& listener) {  // one that does not listen: nothing happens
    change(listener, false);
  }
  bool on() const { return on_.load(std::memory_order_relaxed); }            // somebody listens
  bool records() const { return records_.load(std::memory_order_relaxed); }  // there are recorders
  bool waits() const { return waits_.load(std::memory_order_relaxed); }      // one of them wants calls to wait
  ListenersPtr listeners() const;
  std::string caller() const;
  // `waited`: the call has waited for its end; others are not for recorders that want that.
  void ended(const LoggedCall& call, bool waited);

  // Calls that a thread makes within another one belong to that one and are not recorded. Returns whether the call is
  // the outermost one of its thread. Each enter() has a leave() with the same thread.
  bool enter(std::thread::id thread = std::this_thread::get_id());
  void leave(std::thread::id thread = std::this_thread::get_id());

 private:
  void change(const std::shared_ptr<CallRecorder>& recorder, bool add);
  void change(const StepWaitsPtr& steps, bool add);
  void publish(const std::shared_ptr<Listeners>& listeners);  // with the lock

  std::atomic<bool> on_{false}, records_{false}, waits_{false};
  mutable std::mutex mutex_;  // of what follows
  ListenersPtr listeners_ = std::make_shared<Listeners>();
  std::map<std::thread::id, int> depth_;
};
using CallLogPtr = std::shared_ptr<CallLog>;

// enter() and leave() of a block.
class CallScope {
 public:
  explicit CallScope(CallLogPtr log) : log_(std::move(log)), outermost_(log_->enter(thread_)) {}
  ~CallScope() { log_->leave(thread_); }
  CallScope(const CallScope&) = delete;
  bool outermost() const { return outermost_; }

 private:
  const CallLogPtr log_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const bool outermost_;
};

// A thread is blocked in a call as long as it is there. Of several engines, those in whose phases the thread is count
// it; all do where there is none.
class Blocked {
 public:
  // `reduces`: the call is a part of a reduction. `stream`: the thread's current stream of the device waits, too.
  Blocked(const CallLog& log, bool reduces, bool stream = false);
  ~Blocked();
  Blocked(const Blocked&) = delete;

 private:
  const CallLog::ListenersPtr listeners_;
  struct Counted {
    StepWaits* steps;
    size_t mark;  // of the clock
    bool stream;
  };
  std::vector<Counted> counted_;
};

}  // namespace ds::comm

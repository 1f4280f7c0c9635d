// The log of communication calls of a process: what each call was, how large it was and how long it took. Communicators
// write into it (logged.h), torch.distributed's own calls do (torch_calls.h), and Python adds its verbs.
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

namespace ds::comm {

// One finished call.
struct LoggedCall {
  std::string op;          // the name of the function, all_reduce
  std::string caller;      // the function of the script that made it; "" where that is not known
  int64_t bytes = 0;       // that the rank passes to it; of a scatter, that it gets
  double ms = 0;           // from the call to its end on this rank
  int ranks = 0;           // of the group; 0: unknown
  std::string label = {};  // the name that it is recorded under; "": `op`, if such calls are wanted
};

// Costs one comparison for each call while it is off. Any thread may use it.
class CallLog {
 public:
  using Caller = std::function<std::string()>;

  // While it is on, every call that is logged waits for its end, so that its time is its own: nothing overlaps.
  // `caller` names the function that makes the current call; null: names are not wanted.
  void turn(bool on, Caller caller = nullptr);
  bool on() const { return on_.load(std::memory_order_relaxed); }
  std::string caller() const;
  void add(LoggedCall call);
  std::vector<LoggedCall> take();  // calls since the last take, in the order of their ends

  // Calls that a thread makes within another one belong to that one and are not logged. Returns whether the call is the
  // outermost one of its thread. Each enter() has a leave() with the same thread.
  bool enter(std::thread::id thread = std::this_thread::get_id());
  void leave(std::thread::id thread = std::this_thread::get_id());

 private:
  std::atomic<bool> on_{false};
  mutable std::mutex mutex_;  // of what follows
  Caller caller_;
  std::vector<LoggedCall> calls_;
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

}  // namespace ds::comm

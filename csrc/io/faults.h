// Faults on order: a process can be told to fail, or to die, at its n-th write, fsync, rename or open-for-writing.
//
// Tests sweep n to show that no moment exists at which a crash loses a checkpoint.
#pragma once
#include <mutex>
#include <string>

namespace ds::io {

enum class Call { kOpen, kWrite, kSync, kRename };  // "open" counts files opened for writing only
constexpr int kCalls = 4;

class Faults {
 public:
  enum class Action { kNone, kKill, kShort, kError };
  struct Verdict {
    Action action = Action::kNone;
    int code = 0;  // errno, of kError
  };

  // "write|fsync|rename|open:<n>:kill|enospc|eio|short", n from 1; empty: no fault. `short` (of write only) is no
  // error: the system takes half of what it was given. Throws ErrorKind::kValue for anything else.
  explicit Faults(const std::string& order = "") { arm(order); }

  // Takes another order and counts from 0 again.
  void arm(const std::string& order);

  // Counts the call. kKill is for the caller to carry out (with `die`), so that a write can be torn first.
  Verdict count(Call call);

  // Ends the process as kill -9 does.
  [[noreturn]] static void die();

 private:
  std::mutex lock_;
  Call call_ = Call::kOpen;
  long long at_ = 0;  // 0: never
  long long seen_[kCalls] = {};
  Verdict verdict_;
};

}  // namespace ds::io

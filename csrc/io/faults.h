// Faults on order: a process can be told to fail, or to die, at its n-th read, write, fsync, rename or
// open-for-writing, and to behave as on a file system that lacks a system call.
//
// Tests sweep n to show that no moment exists at which a crash loses a checkpoint.
#pragma once
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

namespace ds::io {

// "open" counts files opened for writing only; "read" counts what Files and AsyncFile read; "rename" counts every
// change of names, of which "rename_dir" counts those of folders and "exchange" the swaps; "truncate" counts calls of
// ftruncate; "direct" counts opens with O_DIRECT ("direct:1+:einval": a file system that has none).
enum class Call { kOpen, kWrite, kSync, kRename, kRenameFolder, kExchange, kTruncate, kRead, kDirect };
constexpr int kCalls = 9;

class Faults {
 public:
  enum class Action { kNone, kKill, kShort, kError };
  struct CheckResult {
    Action action = Action::kNone;
    int code = 0;  // errno, of kError
  };

  // "<call>:<n>:<action>", n from 1; "<n>+": from the n-th on. Several, with commas between; the first that applies
  // acts. Empty: no fault. Actions: kill, an error by its name, and `short` (of read and write only), which is no
  // error: the system transfers half of what it was asked to. Throws ErrorKind::kValue for anything else.
  explicit Faults(const std::string& order = "") { arm(order); }

  // Takes another order and counts from 0 again.
  void arm(const std::string& order);

  // Counts the call. kKill is for the caller to carry out (with `die`), so that a write can be torn first.
  CheckResult count(Call call);

  // The bytes of a read of `bytes` that `short` leaves: at least one, whole blocks if there are several.
  static size_t short_read(size_t bytes);

  // Ends the process as kill -9 does.
  [[noreturn]] static void die();

 private:
  struct Order {
    Call call = Call::kOpen;
    long long at = 0;
    bool onwards = false;
    CheckResult verdict;
  };
  static Order parsed(const std::string& text, const std::string& all);

  std::mutex lock_;
  std::vector<Order> orders_;
  long long seen_[kCalls] = {};
};

}  // namespace ds::io

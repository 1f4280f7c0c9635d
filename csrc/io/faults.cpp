#include "io/faults.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/error.h"

namespace ds::io {
namespace {

[[noreturn]] void refuse(const std::string& order) {
  fail(ErrorKind::kValue, "DS_IO_FAULT='", order,
       "' is no fault. Write <call>:<n>:<action>: call is open, write, fsync ",
       "or rename, n counts from 1, action is kill, enospc, eio or (for write) short; for example write:3:kill.");
}

}  // namespace

void Faults::arm(const std::string& order) {
  std::lock_guard<std::mutex> guard(lock_);
  at_ = 0;
  for (long long& seen : seen_) seen = 0;
  if (order.empty()) return;
  const size_t first = order.find(':');
  const size_t second = first == std::string::npos ? first : order.find(':', first + 1);
  if (second == std::string::npos) refuse(order);
  const std::string call = order.substr(0, first);
  const std::string number = order.substr(first + 1, second - first - 1);
  const std::string action = order.substr(second + 1);
  if (call == "open")
    call_ = Call::kOpen;
  else if (call == "write")
    call_ = Call::kWrite;
  else if (call == "fsync")
    call_ = Call::kSync;
  else if (call == "rename")
    call_ = Call::kRename;
  else
    refuse(order);
  if (number.empty() || number.size() > 15 || number.find_first_not_of("0123456789") != std::string::npos)
    refuse(order);
  if (action == "kill")
    verdict_ = {Action::kKill, 0};
  else if (action == "enospc")
    verdict_ = {Action::kError, ENOSPC};
  else if (action == "eio")
    verdict_ = {Action::kError, EIO};
  else if (action == "short" && call_ == Call::kWrite)
    verdict_ = {Action::kShort, 0};
  else
    refuse(order);
  const long long at = atoll(number.c_str());
  if (at < 1) refuse(order);
  at_ = at;
}

Faults::Verdict Faults::count(Call call) {
  std::lock_guard<std::mutex> guard(lock_);
  const long long seen = ++seen_[static_cast<int>(call)];
  return at_ != 0 && call == call_ && seen == at_ ? verdict_ : Verdict{};
}

void Faults::die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();  // the signal may arrive a moment later
}

}  // namespace ds::io

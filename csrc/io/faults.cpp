#include "io/faults.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace ds::io {
namespace {

constexpr std::pair<const char*, Call> kNames[] = {
    {"open", Call::kOpen},         {"write", Call::kWrite},       {"fsync", Call::kSync},
    {"rename", Call::kRename},     {"exchange", Call::kExchange}, {"rename_dir", Call::kRenameFolder},
    {"truncate", Call::kTruncate}, {"read", Call::kRead},         {"direct", Call::kDirect},
};
constexpr std::pair<const char*, int> kErrors[] = {
    {"enospc", ENOSPC},      {"eio", EIO},       {"exdev", EXDEV},
    {"einval", EINVAL},      {"enosys", ENOSYS}, {"eperm", EPERM},
    {"enotsup", EOPNOTSUPP}, {"emfile", EMFILE}, {"eintr", EINTR},
};

[[noreturn]] void refuse(const std::string& order) {
  fail(ErrorKind::kValue, "DS_IO_FAULT='", order,
       "' is not a fault. Write <call>:<n>:<action>, several with commas between: call is open, read, write, fsync, "
       "rename, ",
       "rename_dir, exchange, truncate or direct, n counts from 1 (n+: from there on), action is kill, enospc, eio, "
       "exdev, ",
       "einval, enosys, eperm, enotsup, emfile, eintr or (for read and write) short; for example write:3:kill.");
}

}  // namespace

Faults::Order Faults::parsed(const std::string& text, const std::string& all) {
  const size_t first = text.find(':');
  const size_t second = first == std::string::npos ? first : text.find(':', first + 1);
  if (second == std::string::npos) refuse(all);
  const std::string call = text.substr(0, first);
  std::string number = text.substr(first + 1, second - first - 1);
  const std::string action = text.substr(second + 1);
  Order order;
  bool known = false;
  for (const auto& [name, value] : kNames) {
    if (call != name) continue;
    order.call = value;
    known = true;
  }
  if (!known) refuse(all);
  if (!number.empty() && number.back() == '+') {
    order.onwards = true;
    number.pop_back();
  }
  if (number.empty() || number.size() > 15 || number.find_first_not_of("0123456789") != std::string::npos) refuse(all);
  order.at = atoll(number.c_str());
  if (order.at < 1) refuse(all);
  if (action == "kill") order.verdict = {Action::kKill, 0};
  if (action == "short" && (order.call == Call::kWrite || order.call == Call::kRead))
    order.verdict = {Action::kShort, 0};
  for (const auto& [name, code] : kErrors) {
    if (action == name) order.verdict = {Action::kError, code};
  }
  if (order.verdict.action == Action::kNone) refuse(all);
  return order;
}

void Faults::arm(const std::string& order) {
  std::vector<Order> orders;
  for (size_t begin = 0; begin < order.size();) {
    const size_t end = std::min(order.find(',', begin), order.size());
    orders.push_back(parsed(order.substr(begin, end - begin), order));
    begin = end + 1;
    if (begin == order.size()) refuse(order);  // a comma at the end
  }
  std::lock_guard guard(lock_);
  orders_ = std::move(orders);
  for (long long& seen : seen_) seen = 0;
}

Faults::CheckResult Faults::count(Call call) {
  std::lock_guard guard(lock_);
  const long long seen = ++seen_[static_cast<int>(call)];
  for (const Order& order : orders_) {
    if (order.call == call && (seen == order.at || (order.onwards && seen > order.at))) return order.verdict;
  }
  return {};
}

size_t Faults::short_read(size_t bytes) {
  constexpr size_t kBlock = 4096;
  return bytes > kBlock ? std::max(bytes / 2 / kBlock, size_t{1}) * kBlock : bytes;
}

void Faults::die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();  // the signal may arrive a moment later
}

}  // namespace ds::io

#include "order.h"

#include <execinfo.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <unordered_map>

namespace standin {

void Clock::set(size_t stream, uint64_t number) {
  if (last_.size() <= stream) last_.resize(stream + 1);
  last_[stream] = std::max(last_[stream], number);
}

void Clock::join(const Clock& other) {
  if (last_.size() < other.last_.size()) last_.resize(other.last_.size());
  for (size_t i = 0; i < other.last_.size(); ++i) last_[i] = std::max(last_[i], other.last_[i]);
}

Stack Stack::here() {
  static const bool python = [] {
    const char* wanted = std::getenv("DS_STANDIN_STACKS");
    return wanted && std::string(wanted) == "python";
  }();
  Stack stack;
  stack.depth_ = backtrace(stack.frames_.data(), static_cast<int>(stack.frames_.size()));
  if (python) stack.python_ = python_frames();
  return stack;
}

std::string Stack::text() const {
  std::ostringstream out;
  if (python_) out << text_of_python(python_.get());
  char** names = backtrace_symbols(frames_.data(), depth_);
  for (int i = 0; names && i < depth_; ++i)
    if (!std::strstr(names[i], "libstandin") && !std::strstr(names[i], "libpython"))
      out << "      " << names[i] << "\n";
  std::free(names);
  return out.str();
}

namespace {

// Calls `visit` with the first byte of each item.
template <class Visit>
void each_item(const Access& access, size_t dimension, const char* at, const Visit& visit) {
  if (dimension == access.sizes.size()) return visit(at);
  for (int64_t i = 0; i < access.sizes[dimension]; ++i)
    each_item(access, dimension + 1, at + i * access.strides[dimension], visit);
}

}  // namespace

bool Access::shares_a_byte(const Access& other) const {
  const char* from = std::max(begin, other.begin);
  const char* to = std::min(end, other.end);
  if (from >= to) return false;
  if (dense() && other.dense()) return true;
  std::vector<bool> here(static_cast<size_t>(to - from));
  const auto visit_bytes = [&](const Access& access, const auto& visit) {
    if (access.dense()) {
      for (const char* at = from; at < to; ++at) visit(static_cast<size_t>(at - from));
      return;
    }
    each_item(access, 0, access.begin, [&](const char* item_at) {
      for (const char* at = std::max(item_at, from); at < std::min(item_at + access.item, to); ++at)
        visit(static_cast<size_t>(at - from));
    });
  };
  bool shared = false;
  visit_bytes(*this, [&](size_t at) { here[at] = true; });
  visit_bytes(other, [&](size_t at) { shared = shared || here[at]; });
  return shared;
}

namespace {

struct Record {
  Access access;
  OperationPtr operation;
};
using RecordPtr = std::shared_ptr<const Record>;

constexpr uintptr_t kRegion = 18;  // accesses are kept by 256 KiB of address, so that few have to be compared

struct Accesses {
  std::unordered_map<uintptr_t, std::vector<RecordPtr>> regions;
  std::mutex reports_mutex;
  std::vector<std::string> reports;
};

Accesses& accesses() {
  static auto* all = new Accesses;  // streams run until the process ends
  return *all;
}

bool in_order(const Operation& a, const Operation& b) {
  return a.before.at(b.stream) >= b.number || b.before.at(a.stream) >= a.number;
}

std::string described(const Record& record) {
  std::ostringstream out;
  out << "    " << record.operation->name << " " << (record.access.write ? "writes" : "reads") << " ["
      << static_cast<const void*>(record.access.begin) << ", " << static_cast<const void*>(record.access.end)
      << ") on stream " << record.operation->stream << ", operation " << record.operation->number << ", queued by\n"
      << record.operation->stack.text();
  return out.str();
}

}  // namespace

void Order::check(const OperationPtr& operation, const std::vector<Access>& made) {
  std::set<const Operation*> reported;
  const bool may_forget = kernels_ == 0;
  for (const Access& access : made) {
    if (access.begin == access.end) continue;
    const auto now = std::make_shared<const Record>(Record{access, operation});
    const uintptr_t last = (reinterpret_cast<uintptr_t>(access.end) - 1) >> kRegion;
    for (uintptr_t region = reinterpret_cast<uintptr_t>(access.begin) >> kRegion; region <= last; ++region) {
      std::vector<RecordPtr>& records = accesses().regions[region];
      const auto is_over = [&](const RecordPtr& record) {
        const Access& earlier = record->access;
        const Operation& other = *record->operation;
        if (may_forget && host.at(other.stream) >= other.number) return true;
        if (earlier.begin >= access.end || access.begin >= earlier.end || &other == operation.get()) return false;
        const bool ordered = in_order(*operation, other);
        if (!ordered && (earlier.write || access.write) && !reported.count(&other) && earlier.shares_a_byte(access)) {
          reported.insert(&other);
          found_.push_back([record, now] {
            return "two accesses to the same memory have no order:\n" + described(*record) + "  and\n" +
                   described(*now);
          });
        }
        const bool covered = access.dense() && access.begin <= earlier.begin && earlier.end <= access.end;
        return may_forget && ordered && covered &&
               (access.write || (!earlier.write && other.stream == operation->stream));
      };
      records.erase(std::remove_if(records.begin(), records.end(), is_over), records.end());
      records.push_back(now);
    }
  }
}

void Order::kernel_ended(const OperationPtr& operation, const std::vector<Access>& touched) {
  check(operation, touched);
  --kernels_;
}

void Order::forget(const char* begin, const char* end, size_t stream, uint64_t number) {
  const uintptr_t last = (reinterpret_cast<uintptr_t>(end) - 1) >> kRegion;
  for (uintptr_t region = reinterpret_cast<uintptr_t>(begin) >> kRegion; region <= last; ++region) {
    const auto found = accesses().regions.find(region);
    if (found == accesses().regions.end()) continue;
    const auto is_over = [&](const RecordPtr& record) {
      return record->operation->stream == stream && record->operation->number <= number && record->access.begin < end &&
             begin < record->access.end;
    };
    found->second.erase(std::remove_if(found->second.begin(), found->second.end(), is_over), found->second.end());
  }
}

void Order::tell() {
  std::vector<std::function<std::string()>> found;
  {
    const std::lock_guard lock(mutex);
    found.swap(found_);
  }
  for (const auto& text : found) report(text());
}

void Order::report(const std::string& text) {
  const std::lock_guard lock(accesses().reports_mutex);
  std::fprintf(stderr, "stand-in device: %s\n", text.c_str());
  accesses().reports.push_back(text);
}

std::vector<std::string> Order::reports(bool clear) {
  const std::lock_guard lock(accesses().reports_mutex);
  std::vector<std::string> all = accesses().reports;
  if (clear) accesses().reports.clear();
  return all;
}

Order& order() {
  static auto* one = new Order;
  return *one;
}

}  // namespace standin

#include "counts.h"

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "order.h"
#include "standin.h"

namespace standin {

namespace {

constexpr size_t kCounts = static_cast<size_t>(Count::kNumber);
constexpr std::array<const char*, kCounts> kNames = {
    "operations",          "kernels",  "collectives",  "copies",     "bytes to the device", "bytes to the host",
    "bytes on the device", "events",   "stream waits", "host waits", "blocking copies",     "polls",
    "allocations",         "releases", "reservations", "kept memory"};

struct Counts {
  std::array<std::atomic<uint64_t>, kCounts> all{};
  std::atomic<bool> keeps_stacks{false};
  std::mutex mutex;
  std::vector<Stack> stacks;  // of waits of the host
};

Counts& counts() {
  static auto* one = new Counts;  // streams run until the process ends
  return *one;
}

}  // namespace

void count(Count what, uint64_t by) { counts().all[static_cast<size_t>(what)] += by; }

void count_host_wait(bool copies) {
  count(Count::kHostWaits);
  if (copies) count(Count::kBlockingCopies);
  if (!counts().keeps_stacks) return;
  const Stack here = Stack::here();
  const std::lock_guard lock(counts().mutex);
  counts().stacks.push_back(here);
}

void count_copy(bool from_device, bool to_device, uint64_t bytes) {
  count(Count::kCopies);
  count(from_device && to_device ? Count::kBytesOnDevice
        : to_device              ? Count::kBytesToDevice
                                 : Count::kBytesToHost,
        bytes);
}

}  // namespace standin

#define DS_VISIBLE __attribute__((visibility("default")))

extern "C" {

DS_VISIBLE const char* standin_count_name(int what) {
  return 0 <= what && static_cast<size_t>(what) < standin::kCounts ? standin::kNames[static_cast<size_t>(what)]
                                                                   : nullptr;
}

DS_VISIBLE uint64_t standin_count(int what) { return standin::counts().all.at(static_cast<size_t>(what)); }

DS_VISIBLE void standin_reset_counts(int stacks) {
  standin::Counts& counts = standin::counts();
  for (auto& one : counts.all) one = 0;
  counts.keeps_stacks = stacks != 0;
  const std::lock_guard lock(counts.mutex);
  counts.stacks.clear();
}

DS_VISIBLE const char* standin_host_wait(int index) {
  static thread_local std::string text;
  standin::Stack stack;
  {
    const std::lock_guard lock(standin::counts().mutex);
    const std::vector<standin::Stack>& all = standin::counts().stacks;
    if (index < 0 || static_cast<size_t>(index) >= all.size()) return nullptr;
    stack = all[static_cast<size_t>(index)];
  }
  text = stack.text();
  return text.c_str();
}

}  // extern "C"

#include "storage/background_transfers.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace ds::storage {

BackgroundTransfers::BackgroundTransfers(StorageLock& lock, int threads, bool at_once)
    : lock_(lock), threads_(at_once ? 0 : threads) {
  if (threads < 1 || threads > 64) {
    fail(ErrorKind::kValue, "the number of transfer threads must be from 1 to 64, got ", threads);
  }
}

void BackgroundTransfers::run(const std::function<void()>& job) noexcept {
  try {
    threads_.add(job);
  } catch (const std::exception&) {
    job();
  }
}

void BackgroundTransfers::settle() {
  auto lock = lock_.hold();
  while (jobs_ > 0) lock_.wait(lock);
  const auto failures = std::exchange(failures_, {});
  if (failures.empty()) return;
  std::string others;
  if (failures.size() > 1) {
    others = " " + std::to_string(failures.size() - 1) + " more blocks could not be written back:";
    for (size_t i = 1; i < std::min<size_t>(failures.size(), 4); ++i) others += "\n" + failures[i]->text;
    if (failures.size() > 4) others += "\n...";
  }
  failures[0]->raise(others);
}

}  // namespace ds::storage

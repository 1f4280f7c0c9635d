#include "io/memory/locked_pool.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include "base/error.h"
#include "base/sizes.h"
#include "io/memory/aligned_pool.h"

namespace ds::io {
namespace {

// Bytes that this process has locked, by whatever means.
size_t locked_by_process() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    if (word != "VmLck:") continue;
    size_t kilobytes = 0;
    status >> kilobytes;
    return kilobytes * 1024;
  }
  return 0;
}

}  // namespace

std::string memlock_shortage(size_t bytes) {
  rlimit limit = {};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  std::ostringstream text;
  if (limit.rlim_cur == RLIM_INFINITY) {
    text << "this process has no limit of locked memory: the host is short of memory";
    return text.str();
  }
  const size_t used = locked_by_process();
  const size_t needed = sizes::sum("page-locked bytes", used, bytes);
  text << "this process may lock " << limit.rlim_cur << " bytes (ulimit -l) and has locked " << used << ": ";
  if (needed > limit.rlim_cur) {
    text << needed - limit.rlim_cur << " bytes are missing. Raise the limit to " << needed
         << " bytes or more: `ulimit -l unlimited`, memlock in /etc/security/limits.conf, or `--ulimit memlock=-1` of "
            "a container";
  } else {
    text << "that is enough, but the host is short of memory";
  }
  return text.str();
}

LockedPool::Block::~Block() {
  if (pool_) pool_->unlock(data_);
  ::munmap(data_, bytes_);
}

std::shared_ptr<LockedPool::Block> LockedPool::allocate(size_t bytes) {
  const size_t whole = sizes::rounded_up("page-locked bytes", std::max<size_t>(bytes, 1), kBlockBytes);
  void* memory = ::mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail(ErrorKind::kRuntime, "no memory for ", whole, " page-locked bytes: ", strerror(errno));
  ::madvise(memory, whole, MADV_HUGEPAGE);  // fewer faults and fewer pages to pin; a hint only
  if (::mlock(memory, whole) != 0) {
    const int code = errno;
    const std::string why = memlock_shortage(whole);
    ::munmap(memory, whole);
    fail(ErrorKind::kRuntime, whole, " bytes of memory cannot be page-locked (", strerror(code), "): ", why, ".");
  }
  auto block = std::make_shared<Block>(shared_from_this(), static_cast<char*>(memory), whole);
  const std::lock_guard guard(lock_);
  locked_.emplace(block->data(), whole);
  bytes_ += whole;
  peak_ = std::max(peak_, bytes_);
  return block;
}

bool LockedPool::holds(const void* data, size_t bytes) const {
  const auto* first = static_cast<const char*>(data);
  const std::lock_guard guard(lock_);
  auto after = locked_.upper_bound(first);
  if (after == locked_.begin()) return false;
  const auto& [begin, size] = *--after;
  return first >= begin && first + bytes <= begin + size;
}

bool LockedPool::release(const void* data) {
  const auto* first = static_cast<const char*>(data);
  const std::lock_guard guard(lock_);
  auto after = locked_.upper_bound(first);
  if (after == locked_.begin()) return false;
  --after;
  if (first >= after->first + after->second) return false;
  ::munlock(after->first, after->second);
  bytes_ -= after->second;
  locked_.erase(after);
  return true;
}

void LockedPool::unlock(const char* data) {
  const std::lock_guard guard(lock_);
  const auto found = locked_.find(data);
  if (found == locked_.end()) return;
  bytes_ -= found->second;
  locked_.erase(found);  // unmapping unlocks
}

size_t LockedPool::locked_bytes() const {
  const std::lock_guard guard(lock_);
  return bytes_;
}

size_t LockedPool::peak_bytes() const {
  const std::lock_guard guard(lock_);
  return peak_;
}

size_t LockedPool::blocks() const {
  const std::lock_guard guard(lock_);
  return locked_.size();
}

}  // namespace ds::io

#include "io/memory/host_memory.h"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>

#include "base/error.h"
#include "base/thread_pool.h"

namespace ds::io {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kShare = 4 << 20;  // bytes that one thread takes at a time: memcpy goes past the caches for them

int useful_threads(size_t shares, int threads) {
  if (threads < 1) fail(ErrorKind::kValue, "the number of threads that copy must be at least 1, got ", threads);
  return static_cast<int>(std::min<size_t>(std::max<size_t>(shares, 1), std::min(threads, 256)));
}

}  // namespace

HostMemory::HostMemory(size_t bytes, int threads) : bytes_(bytes), data_(nullptr) {
  if (bytes == 0) fail(ErrorKind::kValue, "host memory of 0 bytes");
  const size_t shares = (bytes + kShare - 1) / kShare;
  const int used = useful_threads(shares, threads);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    fail(ErrorKind::kRuntime, "no memory for a snapshot of ", bytes,
         " bytes. Set checkpoint.host_cache_size (GiB) to what this host can spare, or free memory on it.");
  }
  data_ = static_cast<char*>(memory);
  ::madvise(memory, bytes, MADV_HUGEPAGE);  // far fewer faults; a hint only
  ThreadPool pool(used);
  pool.parallel_for(bytes, kShare, [this](size_t begin, size_t end) {
    for (size_t at = begin; at < end; at += kPage) *static_cast<volatile char*>(data_ + at) = 0;
  });
}

HostMemory::~HostMemory() { ::munmap(data_, bytes_); }

void copy_all(const std::vector<Copy>& copies, int threads) {
  std::vector<Copy> shares;
  for (const Copy& copy : copies) {
    for (size_t at = 0; at < copy.bytes; at += kShare) {
      shares.push_back({static_cast<const char*>(copy.from) + at, static_cast<char*>(copy.to) + at,
                        std::min(kShare, copy.bytes - at)});
    }
  }
  ThreadPool pool(useful_threads(shares.size(), threads));
  pool.parallel_for(shares.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) memcpy(shares[i].to, shares[i].from, shares[i].bytes);
  });
}

}  // namespace ds::io

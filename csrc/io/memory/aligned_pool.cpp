#include "io/memory/aligned_pool.h"

#include <sys/mman.h>

#include <algorithm>

#include "base/error.h"
#include "base/sizes.h"

namespace ds::io {
namespace {

// Memory straight from the system: pages that no one writes to are never there, and all of it goes back at the end.
char* map_memory(size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    fail(ErrorKind::kRuntime, "no memory for write buffers of ", bytes,
         " bytes. Lower checkpoint.writer.io_buffer_size, or free memory on this host.");
  }
  ::madvise(memory, bytes, MADV_HUGEPAGE);  // fewer faults and fewer pages to pin; a hint only
  return static_cast<char*>(memory);
}

}  // namespace

void AlignedPool::Release::operator()(char* memory) const { ::munmap(memory, bytes); }

AlignedPool::AlignedPool(size_t buffers, size_t bytes)
    : buffer_bytes_(sizes::rounded_up("bytes of a buffer", std::max<size_t>(bytes, 1), kBlockBytes)),
      memory_(nullptr, Release{0}) {
  const size_t all = sizes::product("bytes of buffers", buffers, buffer_bytes_);
  memory_ = std::unique_ptr<char, Release>(map_memory(all), Release{all});
  for (size_t i = buffers; i-- > 0;) free_.push_back(memory_.get() + i * buffer_bytes_);
}

char* AlignedPool::take() {
  if (free_.empty()) return nullptr;
  char* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

}  // namespace ds::io

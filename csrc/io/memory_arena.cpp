#include "io/memory_arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"

namespace ds::io {
namespace {

constexpr uint64_t kHugePage = 2 << 20;

uint64_t aligned_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

std::shared_ptr<MemoryArena> MemoryArena::make(const std::vector<uint64_t>& sizes) {
  return std::shared_ptr<MemoryArena>(new MemoryArena(sizes));
}

MemoryArena::MemoryArena(const std::vector<uint64_t>& sizes) : sizes_(sizes) {
  uint64_t total = 0;
  for (const uint64_t size : sizes) {
    offsets_.push_back(total);
    total += aligned_up(size, kAlignment);
  }
  mapped_bytes_ = aligned_up(std::max<uint64_t>(total, 1), kHugePage) + kHugePage;
  void* memory = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail(ErrorKind::kRuntime, "no memory for ", total, " bytes of tensors");
  mapped_ = static_cast<char*>(memory);
  data_ =
      mapped_ + (aligned_up(reinterpret_cast<uintptr_t>(mapped_), kHugePage) - reinterpret_cast<uintptr_t>(mapped_));
  ::madvise(data_, aligned_up(total, kHugePage), MADV_HUGEPAGE);  // a hint only
}

MemoryArena::~MemoryArena() { ::munmap(mapped_, mapped_bytes_); }

void MemoryArena::release(size_t index) const noexcept {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(block(index));
  const uint64_t first = aligned_up(begin, page), last = (begin + sizes_[index]) / page * page;
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace ds::io

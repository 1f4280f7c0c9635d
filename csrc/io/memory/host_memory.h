// Host memory for snapshots, and filling it at the speed of memory.
#pragma once
#include <cstddef>
#include <vector>

namespace ds::io {

// Memory straight from the system, page-aligned, every page in place: who fills it does not wait for the kernel to find
// one. All of it goes back when this is destroyed.
class HostMemory {
 public:
  // `bytes` >= 1, touched by `threads` >= 1. Throws ErrorKind::kRuntime when the memory is not there.
  HostMemory(size_t bytes, int threads);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  char* data_;
};

struct Copy {
  const void* from = nullptr;
  void* to = nullptr;
  size_t bytes = 0;
};

// Does all copies, large ones shared among `threads` >= 1, the caller counted; returns when all are done. Sources and
// targets must not overlap.
void copy_all(const std::vector<Copy>& copies, int threads);

}  // namespace ds::io

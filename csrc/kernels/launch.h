// What every kernel entry takes: where to run, and plain runs of elements.
#pragma once
#include <cstddef>

#include "base/dtype.h"
#include "base/thread_pool.h"

namespace ds::kernels {

// Where a kernel runs. CPU: on `pool` (null: on the calling thread). CUDA: on `stream`, a cudaStream_t of the
// device that is current on the calling thread.
struct Launch {
  ThreadPool* pool = nullptr;
  void* stream = nullptr;
};

struct Segment {
  void* data;
  size_t numel;
};

}  // namespace ds::kernels

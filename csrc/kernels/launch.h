// The common arguments of kernel entries: the device to run on, and plain runs of elements.
#pragma once
#include <cstddef>

#include "base/dtype.h"
#include "base/thread_pool.h"

namespace ds::kernels {

// Memory that an entry needs for itself, on the device, from whoever calls it.
class Scratch {
 public:
  // Returns at least `bytes` bytes for the work that this entry puts on Launch::stream; another call may take them
  // back. Returns null where there are none; the maker of the scratch then knows why. Does not throw.
  virtual void* allocate(size_t bytes) noexcept = 0;

 protected:
  ~Scratch() = default;
};

// The place where a kernel is executed. CPU: on `pool` (null: on the calling thread). CUDA: on `stream`, a cudaStream_t
// of the device that is current on the calling thread; `scratch` is asked before the first launch, and when it has
// nothing the entry does nothing at all. The CPU's entries need none.
struct Launch {
  ThreadPool* pool = nullptr;
  void* stream = nullptr;
  Scratch* scratch = nullptr;
};

struct Segment {
  void* data;
  size_t numel;
};

// Elements that are looked at, and where the result goes.
struct Checked {
  const void* data;
  size_t numel;
  int32_t* found;
};
constexpr int32_t kFoundInf = 1, kFoundNan = 2;

// Elements that are copied, or added, from one place to another.
struct Move {
  void* to;
  const void* from;
  size_t numel;
};

}  // namespace ds::kernels

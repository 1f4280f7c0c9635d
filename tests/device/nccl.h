// The stand-in device tells the library that stands in for NCCL of host waits and of memory that grows, if one is used
// (standin_use_nccl).
#pragma once
#include "streams.h"

namespace standin {

// As long as this lives, the calling thread waits for the operations of NCCL that come before the mark.
class NcclHostWait {
 public:
  explicit NcclHostWait(const Mark& mark);
  ~NcclHostWait();
  NcclHostWait(const NcclHostWait&) = delete;

 private:
  bool told_ = false;
};

// The current device is about to grow its memory: this returns when the operations of NCCL that run on the device now
// have ended, as cudaMalloc may.
void nccl_memory_grows();

}  // namespace standin

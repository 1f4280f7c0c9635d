// What the library that stands in for NCCL is told, if one is used (standin_use_nccl).
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

// The current device is about to grow its memory: returns when the operations of NCCL that run on it now have ended.
void nccl_memory_grows();

}  // namespace standin

// Scratch of kernels from torch's allocator: in the order of the current stream, counted and limited like all of
// torch's memory.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "kernels/launch.h"

namespace ds::zero {

// For one entry of the kernel table, or several in a row on one stream; what it hands out is its own to the end.
class TorchScratch final : public kernels::Scratch {
 public:
  // `reserved`: bytes that are used first, from the start in every call.
  explicit TorchScratch(c10::Device device, at::Tensor reserved = {});
  void* allocate(size_t bytes) noexcept override;
  const std::string& error() const { return error_; }  // why there was none; empty where there was

 private:
  const c10::Device device_;
  const at::Tensor reserved_;
  at::Tensor held_;
  std::string error_;
};

}  // namespace ds::zero

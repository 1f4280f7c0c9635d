// Host memory that a device copies to and from while the host goes on.
#pragma once
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/TensorOptions.h>

#include <exception>

namespace ds::storage {

// Whether this torch can pin memory. Not every device's backend brings an allocator for it.
inline bool can_pin() {
  static const bool can = [] {
    try {
      at::empty({1}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }();
  return can;
}

// Options for small host tensors that `device` copies to or from: pinned where that helps and is possible.
inline at::TensorOptions host_options(const c10::Device& device) {
  return at::TensorOptions().device(at::kCPU).pinned_memory(!device.is_cpu() && !device.is_meta() && can_pin());
}

}  // namespace ds::storage

// Scratch memory of the gradients' way over the wire: borrowed slots, wire and receive buffers.
#pragma once
#include <ATen/Functions.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ds::zero {

class WireBuffers {
 public:
  explicit WireBuffers(c10::Device device) : device_(device) {}

  at::Tensor borrow(int64_t numel, at::ScalarType type) {
    const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(type));
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->numel() != bytes) continue;
      const at::Tensor found = *it;
      free_.erase(it);
      return found.view(type);
    }
    borrowed_bytes_ += bytes;
    peak_bytes_ = std::max(peak_bytes_, borrowed_bytes_);
    return at::empty({bytes}, at::TensorOptions().device(device_).dtype(at::kByte)).view(type);
  }
  void give_back(const at::Tensor& tensor) { free_.push_back(tensor.view(at::kByte)); }
  void clear() {  // nothing is borrowed
    free_.clear();
    borrowed_bytes_ = 0;
  }
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  const c10::Device device_;
  std::vector<at::Tensor> free_;
  int64_t borrowed_bytes_ = 0, peak_bytes_ = 0;
};

}  // namespace ds::zero

// Memory of gathered parameters, kept between uses: fresh pages cost more than what is copied into them.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace ds::zero {

class BufferPool {
 public:
  at::Tensor take(int64_t numel, const at::TensorOptions& options);
  void give(const at::Tensor& buffer);  // nobody else refers to it; an undefined one is ignored
  void clear() { free_.clear(); }
  int64_t held_bytes() const;

 private:
  std::vector<at::Tensor> free_;
};

}  // namespace ds::zero

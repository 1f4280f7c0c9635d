// Bytes that tensors on the meta device, which have no memory, would take: each storage is counted from track() until
// it is released, by whatever has held it: autograd, its graph, Python.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace ds::storage {

class MetaMemory {
 public:
  MetaMemory();
  void track(const at::Tensor& tensor);   // once for each storage; tensors of other devices are none of them
  void ignore(const at::Tensor& tensor);  // its storage is never counted: weights
  int64_t live() const;
  int64_t peak() const;  // the most since the last reset_peak()
  void reset_peak();

 private:
  struct Count;
  struct Counted;
  void tie(const at::Tensor& tensor, bool counts);

  std::shared_ptr<Count> count_;
};

}  // namespace ds::storage

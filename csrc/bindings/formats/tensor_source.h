// The bytes of a tensor in a file, taken from its memory piece by piece: no second copy of a state is ever made.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "base/sizes.h"
#include "io/byte_source.h"

namespace ds::bindings {

// The bytes of a tensor, in memory order or in row-major order. In memory order, a tensor without gaps keeps its memory
// as it is, with its strides (transposed, expanded ...): what shares that memory shares the bytes, `key` being equal. A
// tensor with gaps (a slice of columns), and every tensor in row-major order that is not so already, is put in order
// while it is written, a piece at a time.
class TensorSource : public io::ByteSource {
 public:
  explicit TensorSource(const at::Tensor& tensor, bool row_major = false);

  const at::Tensor& tensor() const { return flat_.defined() ? flat_ : rows_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<int64_t>& stride() const { return stride_; }
  int64_t numel() const { return numel_; }  // that are stored
  const std::string& key() const { return key_; }

  uint64_t bytes() const override {
    return sizes::product<uint64_t>("bytes of a tensor", static_cast<uint64_t>(numel_), tensor().element_size());
  }
  bool in_place() const override { return flat_.defined() && flat_.is_cpu(); }
  bool on_device() const override { return !tensor().is_cpu(); }
  void each(io::Staging& staging, const io::TakePiece& take) const override;
  void copy_range(char* to, uint64_t begin, uint64_t end) const override;

 private:
  at::Tensor flat_, rows_;  // one of them
  std::vector<int64_t> shape_, stride_;
  int64_t numel_;
  std::string key_;
};

}  // namespace ds::bindings

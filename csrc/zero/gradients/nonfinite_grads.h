// The parameters whose gradients on this rank were inf or nan, before any reduction spread them.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "zero/device_context.h"

namespace ds::zero {

struct NonfiniteGrad {
  int32_t param;
  bool nan;  // else inf
};

class NonfiniteGrads {
 public:
  NonfiniteGrads(const DeviceContext& device, size_t params, bool wanted);  // not wanted: it remembers nothing

  void note(size_t param, const at::Tensor& grad) const {
    if (sums_.defined()) add(param, grad);
  }
  void clear() {
    if (sums_.defined()) sums_.zero_();
  }
  std::vector<NonfiniteGrad> found() const;  // waits for the device

 private:
  void add(size_t param, const at::Tensor& grad) const;

  const DeviceContext& device_;
  at::Tensor sums_;  // of the squares of each gradient, fp64
};

}  // namespace ds::zero

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

  // Looks at the gradients of `params`, in few launches.
  void note(const std::vector<size_t>& params, const std::vector<at::Tensor>& grads) const {
    if (found_.defined()) look(params, grads);
  }
  void clear() {
    if (found_.defined()) found_.zero_();
  }
  std::vector<NonfiniteGrad> found() const;  // waits for the device

 private:
  void look(const std::vector<size_t>& params, const std::vector<at::Tensor>& grads) const;

  const DeviceContext& device_;
  at::Tensor found_;  // of each parameter: bits of kernels::kFoundInf and kFoundNan
};

}  // namespace ds::zero

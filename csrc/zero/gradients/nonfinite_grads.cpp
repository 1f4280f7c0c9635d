#include "zero/gradients/nonfinite_grads.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>

#include <cmath>

namespace ds::zero {

NonfiniteGrads::NonfiniteGrads(const DeviceContext& device, size_t params, bool wanted) : device_(device) {
  if (wanted)
    sums_ = at::zeros({static_cast<int64_t>(params)}, at::TensorOptions().device(device.device()).dtype(at::kDouble));
}

void NonfiniteGrads::add(size_t param, const at::Tensor& grad) const {
  if (grad.is_sparse() || !has_kernel_dtype(grad.scalar_type()) || !grad.is_non_overlapping_and_dense()) return;
  const c10::DeviceGuard current(device_.device());
  const kernels::Segment segment{grad.data_ptr(), static_cast<size_t>(grad.numel())};
  device_.run([&](const kernels::Launch& launch) {
    device_.table().sum_squares(launch, &segment, 1, kernel_dtype(grad.scalar_type(), "gradient"),
                                static_cast<double*>(sums_.data_ptr()) + param);
  });
}

std::vector<NonfiniteGrad> NonfiniteGrads::found() const {
  std::vector<NonfiniteGrad> found;
  if (!sums_.defined()) return found;
  const at::Tensor sums = sums_.to(at::kCPU);
  for (int64_t param = 0; param < sums.numel(); ++param) {
    const double sum = sums.data_ptr<double>()[param];
    if (!std::isfinite(sum)) found.push_back({static_cast<int32_t>(param), std::isnan(sum)});
  }
  return found;
}

}  // namespace ds::zero

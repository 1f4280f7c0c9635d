#include "zero/gradients/nonfinite_grads.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>

#include <map>

namespace ds::zero {

NonfiniteGrads::NonfiniteGrads(const DeviceContext& device, size_t params, bool wanted) : device_(device) {
  if (wanted)
    found_ = at::zeros({static_cast<int64_t>(params)}, at::TensorOptions().device(device.device()).dtype(at::kInt));
}

void NonfiniteGrads::look(const std::vector<size_t>& params, const std::vector<at::Tensor>& grads) const {
  const c10::DeviceGuard current(device_.device());
  std::map<at::ScalarType, std::vector<kernels::Checked>> by_type;
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& grad = grads[i];
    if (grad.is_sparse() || !has_kernel_dtype(grad.scalar_type()) || !grad.is_non_overlapping_and_dense()) continue;
    by_type[grad.scalar_type()].push_back(
        {grad.data_ptr(), static_cast<size_t>(grad.numel()), static_cast<int32_t*>(found_.data_ptr()) + params[i]});
  }
  for (const auto& [type, arrays] : by_type)
    device_.run([&, type = type, &arrays = arrays](const kernels::Launch& launch) {
      device_.table().find_nonfinite(launch, arrays.data(), arrays.size(), kernel_dtype(type, "gradient"));
    });
}

std::vector<NonfiniteGrad> NonfiniteGrads::found() const {
  std::vector<NonfiniteGrad> found;
  if (!found_.defined()) return found;
  const at::Tensor bits = found_.to(at::kCPU);
  for (int64_t param = 0; param < bits.numel(); ++param)
    if (const int32_t one = bits.data_ptr<int32_t>()[param])
      found.push_back({static_cast<int32_t>(param), (one & kernels::kFoundNan) != 0});
  return found;
}

}  // namespace ds::zero

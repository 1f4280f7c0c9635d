// Everything the engine needs from the device its tensors are on: kernels, where to launch them, host read-back.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <memory>
#include <optional>

#include "base/dtype.h"
#include "base/thread_pool.h"
#include "kernels/table.h"

namespace ds::zero {

// The kernels' name of a torch type; fails for a type they do not know, naming `what`.
DType kernel_dtype(at::ScalarType type, const char* what);
bool has_kernel_dtype(at::ScalarType type);

class DeviceContext {
 public:
  // `threads` serves CPU kernels. Fails with the reason where the device's kernels are missing or cannot run.
  DeviceContext(c10::Device device, int threads);

  const c10::Device& device() const { return device_; }
  const kernels::KernelTable& table() const { return *table_; }
  kernels::Launch launch() const;  // on the device's current stream; the caller makes the device current

  // dst = src * scale and dst += src * scale, any dtypes. dst is dense (in any memory order); src has as many elements
  // and may be strided or sparse.
  void copy(const at::Tensor& dst, const at::Tensor& src, float scale) const;
  void accumulate(const at::Tensor& dst, const at::Tensor& src, float scale) const;

  // The same on raw memory of this device, for `numel` elements of dtypes that has_kernel_dtype() accepts.
  void move(void* dst, at::ScalarType dst_type, const void* src, at::ScalarType src_type, int64_t numel, float scale,
            bool add) const;

  // The elements of `src`, dense, in the memory order of a tensor of these sizes and strides, as one dimension.
  at::Tensor flattened(const at::Tensor& src, at::IntArrayRef sizes, at::IntArrayRef strides) const;

  // Scratch in device memory.
  double* sum() const { return static_cast<double*>(sum_.data_ptr()); }
  const at::Tensor& sum_tensor() const { return sum_; }
  kernels::StepScale* step_scale() const { return static_cast<kernels::StepScale*>(step_scale_.data_ptr()); }

  // Starts to bring *step_scale() to the host; read_step_scale() waits for that, not for later work on the stream.
  void post_step_scale();
  kernels::StepScale read_step_scale();
  void check() const;  // fails with the device's own message when one of its kernels could not run

 private:
  c10::Device device_;
  std::unique_ptr<ThreadPool> pool_;
  const kernels::KernelTable* table_;
  at::Tensor sum_, step_scale_, step_scale_host_;
  std::optional<c10::Event> posted_;
};

}  // namespace ds::zero

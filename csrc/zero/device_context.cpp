#include "zero/device_context.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/nccl/native_stream.h"
#include "storage/fence.h"
#include "storage/meta_memory.h"
#include "storage/pinned.h"
#include "zero/any_codes.h"
#include "zero/any_kernels.h"
#include "zero/meta_kernels.h"
#include "zero/torch_compat.h"

namespace ds::zero {

namespace {

// The CPU's library, and no other body, cannot fail.
bool can_fail(const c10::Device& device, const kernels::KernelTable& table) {
  return !device.is_cpu() || scratch_bytes(table, device, 1, 1) > 0;
}

}  // namespace

const kernels::KernelTable& kernels_of(const c10::Device& device) {
  const std::string name = c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  if (device.is_meta() && storage::MetaMemory::installed()) return meta_kernels();  // a step is planned
  if (device.is_meta() || !c10::impl::hasDeviceGuardImpl(device.type()))
    fail(ErrorKind::kNotImplemented, "nothing can be trained on the device ", device.str(),
         ": this torch has no guard ", "for '", name,
         "'. Import the package that brings this device to torch before deepspeed.initialize, or move ",
         "the model to another device");
  const char* body = std::getenv("DS_DEVICE_BODY");
  const std::string chosen = body != nullptr ? body : "";
  if (!chosen.empty() && chosen != "any")
    fail(ErrorKind::kValue, "the environment variable DS_DEVICE_BODY is '", chosen,
         "'. Set it to 'any', for kernels made of operations of torch, or unset it, for the kernel library of the ",
         "device");
  if (!chosen.empty() || !ds_has_kernels(name.c_str())) return any_kernels(device.type());
  const kernels::KernelTable* table = ds_kernels(kernels::kKernelAbi, name.c_str());
  if (!table) fail(ErrorKind::kRuntime, ds_kernels_error(kernels::kKernelAbi, name.c_str()));
  if (const char* problem = table->device_error()) fail(ErrorKind::kRuntime, problem);
  return *table;
}

bool has_kernel_dtype(at::ScalarType type) { return type == at::kFloat || type == at::kHalf || type == at::kBFloat16; }

DType kernel_dtype(at::ScalarType type, const char* what) {
  switch (type) {
    case at::kFloat: return DType::kF32;
    case at::kHalf: return DType::kF16;
    case at::kBFloat16: return DType::kBF16;
    default: fail(ErrorKind::kType, what, " has dtype ", c10::toString(type), "; supported are fp32, fp16 and bf16");
  }
}

DeviceContext::DeviceContext(c10::Device device, int threads, const kernels::KernelTable* table)
    : DeviceContext(device, threads, table != nullptr ? *table : kernels_of(device),
                    table != nullptr || can_fail(device, kernels_of(device))) {}

DeviceContext::DeviceContext(int host_threads)
    : DeviceContext(c10::Device(at::kCPU), host_threads, cpu_library(), /*may_fail=*/false) {}

DeviceContext::DeviceContext(c10::Device device, int threads, const kernels::KernelTable& table, bool may_fail)
    : device_(device),
      threads_(threads),
      may_fail_(may_fail),
      pool_(device.is_cpu() ? std::make_unique<ThreadPool>(threads) : nullptr),
      table_(&table),
      codes_(&codes_of(device, table)) {
  const c10::DeviceGuard current(device_);  // pinned memory, too, opens a context: on this device
  const auto options = at::TensorOptions().device(device_);
  sum_ = at::zeros({3}, options.dtype(at::kDouble));
  step_scale_ =
      at::zeros({static_cast<int64_t>(sizeof(kernels::StepScale) / sizeof(double))}, options.dtype(at::kDouble));
  if (!device_.is_cpu())
    step_scale_host_ = at::zeros(step_scale_.sizes(), storage::host_options(device_).dtype(at::kDouble));
}

kernels::Launch DeviceContext::launch(kernels::Scratch* scratch) const {
  kernels::Launch launch;
  launch.pool = pool_.get();
  launch.scratch = scratch;
  if (!storage::done_on_return(device_))
    launch.stream = comm::native_stream(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return launch;
}

namespace {

// `src` in the memory order of `dst`. Gradients that autograd accumulates already are.
at::Tensor in_order_of(const at::Tensor& dst, const at::Tensor& src) {
  if (src.numel() == dst.numel() && src.sizes() == dst.sizes() && src.strides() == dst.strides()) return src;
  at::Tensor ordered = at::empty_strided(dst.sizes(), dst.strides(), src.options());
  ordered.copy_(src.reshape(dst.sizes()));
  return ordered;
}

}  // namespace

void DeviceContext::copy(const at::Tensor& dst, const at::Tensor& src, float scale) const {
  const c10::DeviceGuard current(device_);
  if (src.is_sparse()) return copy(dst, src.to_dense(), scale);
  if (!has_kernel_dtype(dst.scalar_type()) || !has_kernel_dtype(src.scalar_type()) ||
      !(dst.device() == device_ && src.device() == device_)) {
    dst.copy_(src.reshape(dst.sizes()));
    if (scale != 1.0f) dst.mul_(scale);
    return;
  }
  const at::Tensor flat = in_order_of(dst, src);
  run([&](const kernels::Launch& launch) {
    table_->copy(launch, dst.data_ptr(), kernel_dtype(dst.scalar_type(), "gradient"), flat.data_ptr(),
                 kernel_dtype(flat.scalar_type(), "gradient"), static_cast<size_t>(flat.numel()), scale);
  });
}

void DeviceContext::accumulate(const at::Tensor& dst, const at::Tensor& src, float scale) const {
  const c10::DeviceGuard current(device_);
  if (src.is_sparse()) return accumulate(dst, src.to_dense(), scale);
  if (!has_kernel_dtype(dst.scalar_type()) || !has_kernel_dtype(src.scalar_type()) ||
      !(dst.device() == device_ && src.device() == device_)) {
    dst.add_(src.reshape(dst.sizes()).to(dst.device()), scale);
    return;
  }
  const at::Tensor flat = in_order_of(dst, src);
  run([&](const kernels::Launch& launch) {
    table_->accumulate(launch, dst.data_ptr(), kernel_dtype(dst.scalar_type(), "gradient"), flat.data_ptr(),
                       kernel_dtype(flat.scalar_type(), "gradient"), static_cast<size_t>(flat.numel()), scale);
  });
}

void DeviceContext::move(void* dst, at::ScalarType dst_type, const void* src, at::ScalarType src_type, int64_t numel,
                         float scale, bool add) const {
  if (numel == 0) return;         // there may be no address
  constexpr int64_t kTiny = 256;  // bytes: the way to a kernel would cost more than the copy
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(src_type));
  if (bytes <= kTiny && device_.is_cpu() && !add && scale == 1.0f && src_type == dst_type) {
    std::memcpy(dst, src, static_cast<size_t>(bytes));
    return;
  }
  const auto entry = add ? table_->accumulate : table_->copy;
  const auto call = [&](const kernels::Launch& launch) {
    entry(launch, dst, kernel_dtype(dst_type, "gradient"), src, kernel_dtype(src_type, "gradient"),
          static_cast<size_t>(numel), scale);
  };
  if (device_.is_cpu()) return run(call);
  const c10::DeviceGuard current(device_);
  run(call);
}

at::Tensor DeviceContext::flattened(const at::Tensor& src, at::IntArrayRef sizes, at::IntArrayRef strides) const {
  if (src.is_sparse()) return flattened(src.to_dense(), sizes, strides);
  if (src.sizes() == sizes && src.strides() == strides) return src.as_strided({src.numel()}, {1});
  const at::Tensor ordered = at::empty_strided(sizes, strides, src.options());
  ordered.copy_(src.reshape(sizes));
  return ordered.as_strided({ordered.numel()}, {1});
}

void DeviceContext::post_step_scale() {
  arrived_ = false;
  if (const plan::StepPlan* clock = storage::planned_clock(device_)) planned_ = clock->mark();
  if (storage::done_on_return(device_)) return;
  step_scale_host_.copy_(step_scale_, /*non_blocking=*/true);
  if (!posted_) posted_.emplace(device_.type());
  posted_->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

kernels::StepScale DeviceContext::read_step_scale() {
  kernels::StepScale result{1.0, 1.0f, 0};
  if (device_.is_meta()) {  // a step that is planned succeeds
    plan::StepPlan* clock = storage::planned_clock(device_);
    if (clock && !std::exchange(arrived_, true)) clock->host_waits("norm", planned_);
    return result;
  }
  if (device_.is_cpu()) {
    std::memcpy(&result, step_scale_.data_ptr(), sizeof(result));
    return result;
  }
  if (!arrived_) compat::synchronize(*posted_);
  arrived_ = true;
  std::memcpy(&result, step_scale_host_.data_ptr(), sizeof(result));
  return result;
}

void DeviceContext::set_step_scale(const kernels::StepScale& scale) {
  std::memcpy(step_scale_.data_ptr(), &scale, sizeof(scale));
}

void DeviceContext::reserve(int64_t bytes, int64_t numel) {
  bytes = std::max(bytes, static_cast<int64_t>(scratch_bytes(*table_, device_, threads_, numel)));
  if (reserved_.defined() && reserved_.numel() >= bytes) return;
  reserved_ = at::empty({bytes}, at::TensorOptions().device(device_).dtype(at::kByte));
}

void DeviceContext::note_failure(const std::string& what) const {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = what;
  failed_.store(true, std::memory_order_release);
}

std::string DeviceContext::take_failure() const {
  const std::lock_guard lock(mutex_);
  failed_.store(false, std::memory_order_release);
  return std::exchange(failure_, {});
}

void DeviceContext::note_errors(const TorchScratch& scratch) const {
  if (const char* problem = table_->last_error()) note_failure(problem);
  if (!scratch.error().empty()) note_failure(scratch.error());
}

void DeviceContext::check() const {
  if (const char* problem = table_->last_error()) note_failure(problem);
  if (failed()) fail(ErrorKind::kRuntime, take_failure());
}

}  // namespace ds::zero

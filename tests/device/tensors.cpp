// Operations of the stand-in's own: memory, views, copies.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <cstring>

#include "counts.h"
#include "graphs.h"
#include "memory.h"

namespace standin {

bool is_pinned(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.numel() > 0 && pinned_memory().mapping.holds(tensor.data_ptr());
}

at::Tensor opened(const at::Tensor& tensor) {
  const c10::InferenceMode not_here(false);  // the thread of the stream, which uses it, is not in that mode
  // Tensors without elements may lie anywhere, and operations look at none of their bytes.
  return at::from_blob(open_address(tensor.data_ptr()), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.dtype()));
}

void add_access(std::vector<Access>& accesses, const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  Access access;
  access.begin = static_cast<const char*>(tensor.data_ptr());
  access.write = write;
  access.item = static_cast<int64_t>(tensor.itemsize());
  int64_t last = 0, dense = access.item;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    last += (tensor.size(i) - 1) * tensor.stride(i) * access.item;
    dense *= tensor.stride(i) == 0 ? 1 : tensor.size(i);
  }
  access.end = access.begin + last + access.item;
  if (last + access.item > dense) {
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      if (tensor.stride(i) == 0) continue;
      access.sizes.push_back(tensor.size(i));
      access.strides.push_back(tensor.stride(i) * access.item);
    }
  }
  accesses.push_back(std::move(access));
}

at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::DS_STANDIN_TYPE), type);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr grown = device_allocator().allocate(bytes);
  const auto* from = static_cast<const char*>(storage.data());
  auto* to = static_cast<char*>(grown.get());
  if (const size_t kept = std::min(bytes, storage.nbytes()))
    submit(current_stream(current_device()), "resize", {{from, from + kept, false}, {to, to + kept, true}},
           [=, source = open_address(from), target = open_address(to)] { std::memcpy(target, source, kept); });
  impl.set_data_ptr_noswap(std::move(grown));
  impl.set_nbytes(bytes);
}

namespace {

// A view that reaches beyond its storage makes that larger, as on other devices.
void need_storage(const at::Tensor& self) {
  const size_t needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(),
                                                         static_cast<size_t>(self.storage_offset()));
  if (self.numel() > 0 && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
}

}  // namespace

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, c10::optional<at::MemoryFormat> format) {
  if (self.sizes() != sizes) self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  need_storage(self);
  return self;
}

void copy(const at::Tensor& self, const at::Tensor& from, bool wait) {
  const at::Tensor written = opened(self);
  if (runs_nothing()) {
    if (self.nbytes() <= kCopied) written.copy_(opened(from));
    return;
  }
  at::Tensor read = on_device(from) || is_pinned(from) ? opened(from) : from;
  std::vector<Access> accesses;
  if (on_device(from) || is_pinned(from)) add_access(accesses, from, false);
  if (on_device(self) || is_pinned(self)) add_access(accesses, self, true);
  // Ordinary memory of the host is read before the call returns, and written before it returns.
  if (!on_device(from) && !is_pinned(from)) read = from.clone();
  const c10::DeviceIndex device = on_device(from) ? from.device().index() : self.device().index();
  Stream& stream = current_stream(device);
  Stream& other = current_stream(on_device(self) ? self.device().index() : device);
  standin::wait(stream, mark(other));
  submit(stream, "copy_", std::move(accesses), [read, written] { written.copy_(read); });
  standin::wait(other, mark(stream));
  if (wait) wait_on_host(mark(stream));
}

namespace {

at::Tensor empty(at::IntArrayRef sizes, c10::optional<at::ScalarType> type, c10::optional<at::Layout>,
                 c10::optional<at::Device> device, c10::optional<bool> pinned, c10::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "only memory of the host can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::DS_STANDIN_TYPE),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, c10::optional<at::ScalarType> type,
                         c10::optional<at::Layout>, c10::optional<at::Device> device, c10::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "only memory of the host can be pinned");
  return new_tensor(sizes, strides, c10::dtype_or_default(type), device.value_or(c10::Device(kStandin)));
}

at::Tensor& set_all(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                    at::IntArrayRef strides) {
  TORCH_CHECK(source.device() == self.device(), "set_: a tensor on ", self.device(), " cannot take storage on ",
              source.device());
  at::TensorImpl& impl = *self.unsafeGetTensorImpl();
  impl.set_storage_keep_dtype(std::move(source));
  impl.set_storage_offset(offset);
  if (strides.empty())
    impl.set_sizes_contiguous(sizes);
  else
    impl.set_sizes_and_strides(sizes, strides);
  need_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_all(self, std::move(source), 0, {items}, {});
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_all(
      self,
      c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                         device_allocator().allocate(0), &device_allocator(), true)),
      0, {0}, {});
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  const at::Tensor from = source.expand(self.sizes());
  if (self.numel() == 0) return self;
  if (Graph* graph = recording()) {
    TORCH_CHECK(on_device(from) && on_device(self), "copy_ uses memory of the host, and a graph is being recorded");
    std::vector<Access> accesses;
    add_access(accesses, from, false);
    add_access(accesses, self, true);
    graph->add("copy_", std::move(accesses), {from, self},
               [to = opened(self), read = opened(from)] { at::Tensor(to).copy_(read); });
    return self;
  }
  const bool of_host = on_device(from) != on_device(self);
  const bool wait = of_host && (!non_blocking || (!on_device(self) && !is_pinned(self)));
  count_copy(on_device(from), on_device(self), self.nbytes());
  if (wait) count_host_wait(/*copies=*/true);
  standin::copy(self, from, wait);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor written = target;
  return copy_(written, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar item(const at::Tensor& self) {
  refuse_while_recording("item");
  std::vector<Access> accesses;
  add_access(accesses, self, false);
  at::Scalar value;
  count_copy(/*from_device=*/true, /*to_device=*/false, self.itemsize());
  count_host_wait(/*copies=*/true);
  if (runs_nothing()) return at::_local_scalar_dense(opened(self));
  Stream& stream = current_stream(self.device().index());
  submit(stream, "item", std::move(accesses), [&value, read = opened(self)] { value = at::_local_scalar_dense(read); });
  wait_on_host(mark(stream));
  return value;
}

void record_stream(at::Tensor& self, at::Stream stream) {
  c10::impl::VirtualGuardImpl(kStandin).recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// Parameters stay the objects that they are when a module moves between the host and the device, as on CUDA.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == from.layout();
}

TORCH_LIBRARY_IMPL(aten, DS_STANDIN_TYPE, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_all);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
}

}  // namespace
}  // namespace standin

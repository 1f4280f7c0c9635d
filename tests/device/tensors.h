// Tensors of the stand-in: what an operation of the CPU works on in their place, and which bytes it uses.
#pragma once
#include <ATen/core/Tensor.h>

#include "streams.h"

namespace standin {

// In the mode `null` operations on at most this many bytes of devices run in the call, and copies of this many.
constexpr size_t kDecided = 4096, kCopied = 1 << 17;

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kStandin; }
bool is_pinned(const at::Tensor& tensor);

// The same elements as a tensor of the CPU. Only operations that are queued may use it; it keeps no memory alive.
at::Tensor opened(const at::Tensor& tensor);
void add_access(std::vector<Access>& accesses, const at::Tensor& tensor, bool write);

// Queues a copy between tensors of equal sizes, which nobody counts. `wait`: until it has ended.
void copy(const at::Tensor& self, const at::Tensor& from, bool wait);
at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device);
const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, c10::optional<at::MemoryFormat> format);
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace standin

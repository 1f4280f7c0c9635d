// Views of plain memory, without the dispatcher: a lease may cost a microsecond in all.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace ds::storage {

// `numel` elements of `type` from byte `offset` of the memory behind `memory` on, which need not be all of it. Outside
// of autograd.
inline at::Tensor flat_view(const at::Tensor& memory, int64_t offset, at::ScalarType type, int64_t numel) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(memory.storage()),
                                                   memory.key_set(), c10::scalarTypeToTypeMeta(type));
  impl->set_storage_offset(offset / static_cast<int64_t>(c10::elementSize(type)));
  impl->set_sizes_contiguous({numel});
  return at::Tensor(std::move(impl));
}

inline int64_t bytes_of(const at::Tensor& memory) {
  return memory.numel() * static_cast<int64_t>(memory.element_size());
}

}  // namespace ds::storage

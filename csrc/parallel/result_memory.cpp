#include "parallel/result_memory.h"

#include <ATen/Functions.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <utility>

#include "base/blocking_region.h"
#include "storage/meta_memory.h"

namespace ds::parallel {

at::Tensor ResultMemory::take(const std::vector<int64_t>& sizes, const std::vector<int64_t>& order,
                              const at::TensorOptions& options) {
  std::vector<int64_t> strides(sizes.size());
  int64_t numel = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = numel;
    numel *= sizes[order[i]];
  }
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(c10::typeMetaToScalarType(options.dtype())));
  if (!storage::in_host_memory(options.device()) || bytes < kLeast) return at::empty_strided(sizes, strides, options);
  at::Tensor memory;
  {
    const auto lock = locked(mutex_);
    for (auto it = free_.begin(); it != free_.end() && !memory.defined(); ++it)
      if (it->numel() == bytes) {
        memory = std::move(*it);
        free_.erase(it);
        break;
      }
  }
  storage::MetaMemory* const planned = options.device().is_meta() ? storage::MetaMemory::installed() : nullptr;
  if (memory.defined() && planned) planned->give(memory, planned->owner());
  if (!memory.defined())
    memory = planned ? storage::meta_bytes(bytes) : at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  return at::for_blob(memory.data_ptr(), sizes)
      .strides(strides)
      .deleter([pool = weak_from_this(), memory](void*) {
        if (const auto here = pool.lock()) here->give(memory);
      })
      .options(options)
      .target_device(options.device())
      .make_tensor();
}

void ResultMemory::give(at::Tensor bytes) {
  storage::MetaMemory* const planned = bytes.is_meta() ? storage::MetaMemory::installed() : nullptr;
  if (planned) planned->give(bytes, "buffers");
  const auto lock = locked(mutex_);
  if (free_.size() == kMost) free_.erase(free_.begin());
  free_.push_back(std::move(bytes));
}

}  // namespace ds::parallel

#include "zero/gradients/grad_slots.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

namespace ds::zero {

void GradSlots::put(size_t param, const at::Tensor& slots, int64_t begin, const at::Tensor& grad, float scale,
                    bool add) {
  const ParamSpec& spec = store_.spec(param);
  const plan::ShardMap& map = store_.space_of(param).map;
  const auto index = store_.position(param).index;
  const at::IntArrayRef sizes = spec.sizes(), strides = spec.strides();
  // Nearly every gradient: dense, in the parameter's memory order, of a dtype that kernels know. No tensor is made for
  // it, since that would cost several times what a small gradient does.
  if (!grad.is_sparse() && grad.device() == slots.device() && has_kernel_dtype(grad.scalar_type()) &&
      has_kernel_dtype(slots.scalar_type()) && grad.sizes() == sizes && grad.strides() == strides) {
    const auto move = [&](int64_t to, int64_t from, int64_t numel) {
      device_.move(static_cast<char*>(slots.data_ptr()) + to * static_cast<int64_t>(slots.element_size()),
                   slots.scalar_type(),
                   static_cast<const char*>(grad.data_ptr()) + from * static_cast<int64_t>(grad.element_size()),
                   grad.scalar_type(), numel, scale, add);
    };
    if (map.offsets[index] >= 0) return move(map.offsets[index] - begin, 0, map.numels[index]);
    for (size_t e = map.first[index]; e < map.first[index + 1]; ++e)
      move(map.extents[e].full_offset - begin, map.extents[e].param_offset, map.extents[e].numel);
    return;
  }
  at::NoGradGuard no_grad;  // only here: for a tiny gradient it costs as much as the copy
  if (map.offsets[index] >= 0) {
    const at::Tensor slot =
        slots.as_strided(spec.sizes(), spec.strides(), slots.storage_offset() + map.offsets[index] - begin);
    if (add) {
      device_.accumulate(slot, grad, scale);
    } else {
      device_.copy(slot, grad, scale);
    }
    return;
  }
  const at::Tensor flat = device_.flattened(grad, spec.sharded->sizes(), spec.sharded->strides());
  for (size_t e = map.first[index]; e < map.first[index + 1]; ++e) {
    const plan::Extent& extent = map.extents[e];
    const at::Tensor slot = slots.narrow(0, extent.full_offset - begin, extent.numel);
    const at::Tensor part = flat.narrow(0, extent.param_offset, extent.numel);
    if (add) {
      device_.accumulate(slot, part, scale);
    } else {
      device_.copy(slot, part, scale);
    }
  }
}

void GradSlots::zero(size_t param, const at::Tensor& slots, int64_t begin) {
  const plan::ShardMap& map = store_.space_of(param).map;
  const auto index = store_.position(param).index;
  for (size_t e = map.first[index]; e < map.first[index + 1]; ++e)
    slots.narrow(0, map.extents[e].full_offset - begin, map.extents[e].numel).zero_();
}

void GradSlots::scale(size_t param, const at::Tensor& slots, int64_t begin, float factor) {
  const plan::ShardMap& map = store_.space_of(param).map;
  const auto index = store_.position(param).index;
  for (size_t e = map.first[index]; e < map.first[index + 1]; ++e) {
    const at::Tensor slot = slots.narrow(0, map.extents[e].full_offset - begin, map.extents[e].numel);
    device_.copy(slot, slot, factor);
  }
}

}  // namespace ds::zero

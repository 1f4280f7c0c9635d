#include "zero/gradients/grad_slots.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/ranges.h"

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
    std::vector<kernels::Move> moves;
    const auto move = [&](int64_t to, int64_t from, int64_t numel) {
      auto* const target = static_cast<char*>(slots.data_ptr()) + to * static_cast<int64_t>(slots.element_size());
      const auto* const source =
          static_cast<const char*>(grad.data_ptr()) + from * static_cast<int64_t>(grad.element_size());
      if (!defers_) return device_.move(target, slots.scalar_type(), source, grad.scalar_type(), numel, scale, add);
      if (numel > 0) moves.push_back({target, source, static_cast<size_t>(numel)});
    };
    if (map.offsets[index] >= 0) {
      move(map.offsets[index] - begin, 0, map.numels[index]);
    } else {
      for (size_t e = map.first[index]; e < map.first[index + 1]; ++e)
        move(map.extents[e].full_offset - begin, map.extents[e].param_offset, map.extents[e].numel);
    }
    if (defers_) defer(param, slots, grad, moves, scale, add);
    return;
  }
  settle();
  if (defers_) nonfinite_.note({param}, {grad});
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

void GradSlots::defer(size_t param, const at::Tensor& slots, const at::Tensor& grad,
                      const std::vector<kernels::Move>& moves, float scale, bool add) {
  if (moves.empty()) return;
  if (!storage::done_on_return(store_.device())) {
    const c10::Stream now = c10::impl::VirtualGuardImpl(store_.device().type()).getStream(store_.device());
    if (deferred_[param] || (stream_ && *stream_ != now)) settle();
    stream_ = now;
  } else if (deferred_[param]) {
    settle();
  }
  const auto fits = [&](const Kind& one) {
    return one.to == slots.scalar_type() && one.from == grad.scalar_type() && one.scale == scale && one.add == add;
  };
  auto kind = find_if(kinds_, fits);
  if (kind == kinds_.end()) kind = kinds_.insert(kind, {slots.scalar_type(), grad.scalar_type(), scale, add});
  append(kind->moves, moves);
  held_.push_back(grad);
  held_bytes_ += static_cast<int64_t>(grad.nbytes());
  deferred_[param] = 1;
  params_.push_back(param);
  if (held_bytes_ >= kMostHeld) settle();
}

void GradSlots::settle() {
  if (params_.empty() && gaps_.empty()) return;
  if (!stream_) return launch_deferred();
  const c10::impl::VirtualGuardImpl device(store_.device().type());
  const c10::Stream now = device.getStream(store_.device());
  if (now == *stream_) return launch_deferred();
  device.exchangeStream(*stream_);
  launch_deferred();
  c10::Event copied(store_.device().type());
  copied.record(device.exchangeStream(now));
  copied.block(now);
}

void GradSlots::launch_deferred() {
  nonfinite_.note(params_, held_);
  const c10::DeviceGuard current(store_.device());
  copy_zeros();
  for (const Kind& kind : kinds_)
    device_.run([&](const kernels::Launch& launch) {
      device_.table().move_all(launch, kind.moves.data(), kind.moves.size(), kernel_dtype(kind.to, "gradient"),
                               kernel_dtype(kind.from, "gradient"), kind.scale, kind.add);
    });
  kinds_.clear();
  held_.clear();
  held_bytes_ = 0;
  for (size_t param : params_) deferred_[param] = 0;
  params_.clear();
  stream_.reset();
}

// Zeros come with the copies of gradients: all types of them have the same.
void GradSlots::copy_zeros() {
  if (gaps_.empty()) return;
  if (!zeros_.defined()) {
    zeros_ = at::zeros({kLargestGap}, at::TensorOptions().device(store_.device()).dtype(at::kDouble));
    zeros_made_ = storage::Fence::after(zeros_);
  }
  if (zeros_made_) zeros_made_->wait(zeros_);
  for (const at::Tensor& gap : gaps_) {
    auto kind = find_if(kinds_, [&](const Kind& one) { return one.to == gap.scalar_type() && !one.add; });
    if (kind == kinds_.end()) kind = kinds_.insert(kind, {gap.scalar_type(), gap.scalar_type(), 1.0f, false});
    kind->moves.push_back({gap.data_ptr(), zeros_.data_ptr(), static_cast<size_t>(gap.numel())});
  }
  gaps_.clear();
}

void GradSlots::zero_gaps(const at::Tensor& slots, const std::vector<std::pair<int64_t, int64_t>>& gaps) {
  constexpr size_t kFew = 8;  // more of them cost more than all of the slots
  if (!defers_ && gaps.size() > kFew) {
    slots.zero_();
    return;
  }
  for (const auto& [from, to] : gaps) {
    const at::Tensor gap = slots.narrow(0, from, to - from);
    if (defers_ && to - from <= kLargestGap && has_kernel_dtype(gap.scalar_type())) {
      gaps_.push_back(gap);
    } else {
      gap.zero_();
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

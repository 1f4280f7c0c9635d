#include "zero/gathers/sources/staged_gather.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <thread>
#include <utility>

#include "base/ranges.h"
#include "storage/pinned.h"

namespace ds::zero {

namespace {

constexpr int64_t kAlign = 16;

}  // namespace

StagedGather::StagedGather(comm::Communicator& group, GatherBuffers& buffers, std::vector<ShardedParam*> params,
                           std::optional<uint8_t> note, bool in_place, int64_t limit)
    : memory_(buffers), params_(std::move(params)), in_place_(in_place), note_(note.value_or(0)) {
  at::NoGradGuard no_grad;
  const c10::Device device = params_.empty() ? buffers.device() : params_.front()->device();
  const auto options = at::TensorOptions().device(device).dtype(at::kByte);
  const std::string tag = params_.empty() ? "notes on gathers" : params_.front()->name();
  const int64_t n = group.size();
  int64_t row = 0;
  for (const ShardedParam* param : params_) {
    offsets_.push_back(row);
    row += (param->slice_bytes() + kAlign - 1) / kAlign * kAlign;
  }
  const int64_t note_at = row;
  if (note) row += kAlign;
  if (row * n <= limit) {
    rows_ = memory_.take_passing(row * n, device).view({n, row});
    const at::Tensor mine = rows_.select(0, group.rank());
    for (size_t i = 0; i < params_.size(); ++i)
      if (const int64_t bytes = params_[i]->slice_bytes()) {
        const SliceLease own = params_[i]->slice(storage::Access::kRead);
        mine.narrow(0, offsets_[i], bytes).copy_(own.data().view(at::kByte));
      }
    if (note) {
      mine.narrow(0, note_at, 1).fill_(*note);
      note_column_ = rows_.select(1, note_at);
    }
    if (row) works_.push_back(group.all_gather(mine, rows_, tag));
    return;
  }
  // All memory is taken before the first call: a rank without it has then made none of them.
  std::vector<at::Tensor> own;
  for (ShardedParam* param : params_) {
    buffers_.push_back(in_place_ ? param->buffer() : memory_.take(param->padded_numel(), param->dtype(), device));
    own.push_back(param->shard());
    if (param->offloaded()) {  // the lease is over before the gather is
      own.back() = buffers_.back().narrow(0, group.rank() * param->slice_numel(), param->slice_numel());
      own.back().copy_(param->slice(storage::Access::kRead).data());
    }
  }
  if (note) {
    note_column_ = at::empty({n}, options);
    own.push_back(note_column_.narrow(0, group.rank(), 1).fill_(*note));
  }
  for (size_t i = 0; i < params_.size(); ++i)
    works_.push_back(group.all_gather(own[i], buffers_[i], params_[i]->name()));
  if (note) works_.push_back(group.all_gather(own.back(), note_column_, tag));
}

StagedGather::~StagedGather() {
  try {
    arrive();
  } catch (...) {  // whoever needed it has been told
    return;
  }
}

void StagedGather::give_rows() {
  if (!rows_.defined()) return;
  note_column_ = at::Tensor();
  rows_ = at::Tensor();
}

// The current stream is behind the gather. Notes start on their way to the host, so that who asks later need not wait.
void StagedGather::arrive() {
  if (arrived_) return;
  for (const comm::WorkPtr& work : works_) work->wait();
  arrived_ = true;
  if (!note_column_.defined()) return;
  if (note_column_.device().is_cpu()) {
    host_notes_ = note_column_.clone();
    return;
  }
  if (note_column_.is_meta()) {  // in a step that is planned all ranks say the same
    notes_.assign(static_cast<size_t>(note_column_.size(0)), note_);
    return;
  }
  const at::Tensor column = note_column_.contiguous();
  host_notes_ = at::empty({column.size(0)}, storage::host_options(column.device()).dtype(at::kByte));
  host_notes_.copy_(column, /*non_blocking=*/true);
  const c10::impl::VirtualGuardImpl device(column.device().type());
  copied_.emplace(column.device().type());
  copied_->record(device.getStream(column.device()));
}

const std::vector<uint8_t>& StagedGather::notes() {
  at::NoGradGuard no_grad;
  arrive();
  if (notes_.empty() && host_notes_.defined()) {
    while (copied_ && !copied_->query()) std::this_thread::sleep_for(std::chrono::microseconds(10));
    const auto* first = host_notes_.data_ptr<uint8_t>();
    notes_.assign(first, first + host_notes_.numel());
  }
  return notes_;
}

at::Tensor StagedGather::take(const ShardedParam& param) {
  at::NoGradGuard no_grad;
  arrive();
  const auto index = static_cast<size_t>(index_of(params_, &param));
  if (!buffers_.empty()) return std::exchange(buffers_[index], at::Tensor());
  const at::Tensor buffer =
      in_place_ ? param.buffer() : memory_.take(param.padded_numel(), param.dtype(), param.device());
  if (const int64_t bytes = param.slice_bytes())
    buffer.view(at::kByte).view({-1, bytes}).copy_(rows_.narrow(1, offsets_[index], bytes));
  if (++taken_ == params_.size()) give_rows();
  return buffer;
}

}  // namespace ds::zero

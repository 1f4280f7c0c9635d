#include "zero/gathers/sources/staged_gather.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "base/ranges.h"

namespace ds::zero {

namespace {

constexpr int64_t kAlign = 16;
constexpr int64_t kPieces = 8;  // most slices of a row that are gathered one by one

}  // namespace

StagedGather::StagedGather(comm::Communicator& group, GatherBuffers& buffers, std::vector<ShardedParam*> params,
                           Values values, bool in_place, int64_t limit)
    : memory_(buffers), params_(std::move(params)), values_(values), ranks_(group.size()), in_place_(in_place) {
  at::NoGradGuard no_grad;
  if (params_.empty()) return;
  in_pieces_ = group.groups();
  buffers_.resize(params_.size());
  own_rows_.resize(params_.size());
  int64_t row = 0;
  for (const ShardedParam* param : params_) {
    offsets_.push_back(row);
    row += (param->row_bytes(values_) + kAlign - 1) / kAlign * kAlign;
  }
  if (group.groups() || row * group.size() > limit) {
    start_in_buffers(group);
  } else {
    stage(group, row, params_.front()->device());
  }
}

bool StagedGather::is_direct(const ShardedParam& param) const {
  if (RowReader::reads_nothing(param, values_)) return true;
  return in_pieces_ && param.row_codec(values_) == nullptr && param.row_slices(values_) <= kPieces &&
         !param.row_elsewhere(values_);
}

at::Tensor StagedGather::buffer_of(const ShardedParam& param) const {
  return in_place_ ? param.buffer() : memory_.take(param.padded_numel(), param.dtype(), param.device());
}

void StagedGather::stage(comm::Communicator& group, int64_t row, c10::Device device) {
  rows_ = memory_.take_passing(row * group.size(), device).view({group.size(), row});
  const at::Tensor mine = rows_.select(0, group.rank());
  for (size_t i = 0; i < params_.size(); ++i)
    if (const int64_t bytes = params_[i]->row_bytes(values_)) {
      const SliceLease own = params_[i]->row(values_);
      mine.narrow(0, offsets_[i], bytes).copy_(own.data().view(at::kByte));
    }
  if (row) works_.push_back(group.all_gather(mine, rows_, params_.front()->name()));
}

// All memory is taken before the first call: a rank without it has then made none of them.
void StagedGather::start_in_buffers(comm::Communicator& group) {
  std::vector<comm::TensorPair> pairs;
  for (size_t i = 0; i < params_.size(); ++i) {
    const ShardedParam& param = *params_[i];
    buffers_[i] = buffer_of(param);
    const int64_t bytes = param.row_bytes(values_);
    if (bytes == 0) continue;
    const bool direct = is_direct(param);
    if (direct && param.row_slices(values_) > 1) {
      const int64_t slices = param.row_slices(values_);
      const at::Tensor own = param.row(values_).data().view(param.dtype()).view({slices, -1}),
                       all = buffers_[i].view({slices, -1});
      for (int64_t slice = 0; slice < slices; ++slice) pairs.push_back({own.select(0, slice), all.select(0, slice)});
      continue;
    }
    if (!direct) own_rows_[i] = memory_.take_passing(bytes * ranks_, param.device()).view({ranks_, bytes});
    if (param.row_elsewhere(values_)) {  // the lease is over before the gather is
      const at::Tensor out = direct ? buffers_[i] : own_rows_[i].view({-1});
      const int64_t numel = out.numel() / ranks_;
      pairs.push_back({out.narrow(0, group.rank() * numel, numel), out});
      pairs.back().in.copy_(param.row(values_).data());
    } else {
      pairs.push_back({param.row(values_).data(), direct ? buffers_[i] : own_rows_[i]});
    }
    if (!direct) pairs.back().in = pairs.back().in.view(at::kByte);
  }
  if (pairs.empty()) return;
  if (group.groups()) {
    works_.push_back(group.all_gather(std::move(pairs), params_.front()->name()));
    return;
  }
  for (size_t i = 0, pair = 0; i < params_.size(); ++i)
    if (params_[i]->row_bytes(values_) > 0) {
      works_.push_back(group.all_gather(pairs[pair].in, pairs[pair].out, params_[i]->name()));
      ++pair;
    }
}

StagedGather::~StagedGather() {
  try {
    wait();
  } catch (...) {  // whoever needed it has been told
    return;
  }
}

// The current stream goes on behind the gather.
void StagedGather::wait() {
  if (std::exchange(waited_, true)) return;
  for (const comm::WorkPtr& work : works_) work->wait();
}

void StagedGather::arrive() {
  wait();
  if (std::exchange(arrived_, true)) return;
  RowReader reader(values_, ranks_);
  for (size_t i = 0; i < params_.size(); ++i) {
    const ShardedParam& param = *params_[i];
    if (is_direct(param)) continue;
    if (!buffers_[i].defined()) buffers_[i] = buffer_of(param);
    if (param.row_bytes(values_) == 0) continue;
    const at::Tensor rows = rows_.defined() ? rows_.narrow(1, offsets_[i], param.row_bytes(values_)) : own_rows_[i];
    reader.add(param, rows, buffers_[i]);
  }
  reader.finish();
  own_rows_.clear();
}

at::Tensor StagedGather::take(const ShardedParam& param) {
  at::NoGradGuard no_grad;
  arrive();
  const auto index = static_cast<size_t>(index_of(params_, &param));
  at::Tensor buffer = std::exchange(buffers_[index], at::Tensor());
  if (!buffer.defined()) {
    buffer = buffer_of(param);
    if (const int64_t bytes = param.row_bytes(values_))
      buffer.view(at::kByte).view({-1, bytes}).copy_(rows_.narrow(1, offsets_[index], bytes));
  }
  if (++taken_ == params_.size()) rows_ = at::Tensor();
  return buffer;
}

}  // namespace ds::zero

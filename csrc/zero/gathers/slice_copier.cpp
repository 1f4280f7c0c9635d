#include "zero/gathers/slice_copier.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "base/ranges.h"

namespace ds::zero {

namespace {

constexpr int64_t kRowAlign = 256, kStaged = 16 << 20;  // bytes
int64_t row_aligned(int64_t bytes) { return (bytes + kRowAlign - 1) / kRowAlign * kRowAlign; }

// Bytes of this rank's row in the outer gather.
int64_t own_bytes(const ShardedParam& param) {
  return param.row_bytes(Values::kUsed) / param.row_slices(Values::kUsed);
}

}  // namespace

bool SliceCopier::can_be_coded(const ShardedParam& param) {
  return SliceCodec::takes(param.dtype()) && !param.rests_as_codes() && param.slice_numel() > 0;
}

void SliceCopier::add_codes(const std::vector<ShardedParamPtr>& params, const SliceCodecPtr& codec,
                            const Allocate& allocate) {
  int64_t total = 0;
  for (const ShardedParamPtr& param : params)
    if (can_be_coded(*param)) total += row_aligned(codec->row_bytes(param->slice_numel()));
  const at::Tensor region = allocate(total);
  int64_t begin = 0;
  for (const ShardedParamPtr& param : params) {
    if (!can_be_coded(*param)) continue;
    const int64_t bytes = codec->row_bytes(param->slice_numel());
    param->copies.codec = codec;
    param->copies.codes = region.narrow(0, begin, bytes);
    begin += row_aligned(bytes);
    coded_.push_back(param);
  }
}

void SliceCopier::add_second(const std::vector<ShardedParamPtr>& params, comm::CommunicatorPtr outer,
                             const Allocate& allocate) {
  outer_ = std::move(outer);
  int64_t total = 0;
  for (const ShardedParamPtr& param : params) total += row_aligned(own_bytes(*param) * outer_->size());
  const at::Tensor region = allocate(total);
  int64_t begin = 0;
  for (const ShardedParamPtr& param : params) {
    const int64_t bytes = own_bytes(*param) * outer_->size();
    param->copies.second = region.narrow(0, begin, bytes);
    param->copies.slices = outer_->size();
    begin += row_aligned(bytes);
    if (bytes > 0) second_.push_back(param);
  }
  stale_ = true;
}

void SliceCopier::encode(const std::vector<ShardedParam*>& params) const {
  at::NoGradGuard no_grad;
  std::vector<SliceCodec::Pair> pairs;
  for (const ShardedParam* param : params) {
    if (!param->copies.codec) continue;
    if (param->offloaded()) {  // its elements are here only while the lease lasts
      const SliceLease now = param->slice(storage::Access::kRead);
      param->copies.codec->encode({SliceCodec::pair(now.data().to(param->device()), param->copies.codes)});
    } else {
      pairs.push_back(SliceCodec::pair(param->shard(), param->copies.codes));
    }
  }
  if (!pairs.empty()) coded_.front()->copies.codec->encode(pairs);
}

void SliceCopier::recode(const std::vector<ShardedParam*>& params) {
  if (params.empty()) return;
  encode(params);
  invalidate();
}

void SliceCopier::follow_slices(bool renew) {
  std::vector<ShardedParam*> all;
  for (const ShardedParamPtr& param : coded_) all.push_back(param.get());
  encode(all);
  invalidate();
  if (renew) start();
}

std::vector<int64_t> SliceCopier::offsets(const std::vector<ShardedParam*>& params) {
  std::vector<int64_t> found{0};
  for (const ShardedParam* param : params) found.push_back(found.back() + row_aligned(own_bytes(*param)));
  return found;
}

void SliceCopier::start() {
  if (second_.empty()) return;
  finish();
  stale_ = false;
  at::NoGradGuard no_grad;
  if (outer_->groups()) return start_in_copies();
  std::vector<ShardedParam*> together;
  int64_t bytes = 0;
  for (const ShardedParamPtr& param : second_) {
    const int64_t more = row_aligned(own_bytes(*param)) * outer_->size();
    if (!together.empty() && bytes + more > kStaged) {
      start_staged(std::exchange(together, {}));
      bytes = 0;
    }
    together.push_back(param.get());
    bytes += more;
  }
  start_staged(together);
}

void SliceCopier::start_staged(const std::vector<ShardedParam*>& params) {
  const std::vector<int64_t> at = offsets(params);
  const ShardedParam& first = *params.front();
  const at::Tensor rows =
      buffers_.take_passing(at.back() * outer_->size(), first.device()).view({outer_->size(), at.back()});
  const at::Tensor mine = rows.select(0, outer_->rank());
  for (size_t i = 0; i < params.size(); ++i) {
    const SliceLease own = params[i]->own_row(Values::kUsed);
    mine.narrow(0, at[i], own_bytes(*params[i])).copy_(own.data().view(at::kByte));
  }
  started_.push_back({outer_->all_gather(mine, rows, first.name()), rows, params});
}

void SliceCopier::start_in_copies() {
  std::vector<comm::TensorPair> pairs;
  for (const ShardedParamPtr& param : second_) {
    const at::Tensor& out = param->copies.second;
    const SliceLease own = param->own_row(Values::kUsed);
    if (!param->offloaded() || param->copies.codec) {
      pairs.push_back({own.data().view(at::kByte), out});
      continue;
    }
    const int64_t bytes = own_bytes(*param);
    pairs.push_back({out.narrow(0, outer_->rank() * bytes, bytes), out});
    pairs.back().in.copy_(own.data().view(at::kByte));
  }
  started_.push_back({outer_->all_gather(std::move(pairs), second_.front()->name()), {}, {}});
}

void SliceCopier::finish() {
  at::NoGradGuard no_grad;
  for (const Started& one : std::exchange(started_, {})) {
    one.work->wait();
    const std::vector<int64_t> at = offsets(one.params);
    for (size_t i = 0; i < one.params.size(); ++i) {
      const int64_t bytes = own_bytes(*one.params[i]);
      one.params[i]->copies.second.view({-1, bytes}).copy_(one.rows.narrow(1, at[i], bytes));
    }
  }
}

}  // namespace ds::zero

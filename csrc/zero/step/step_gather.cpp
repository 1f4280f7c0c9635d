#include "zero/step/step_gather.h"

#include <string>
#include <utility>

namespace ds::zero {

void StepGather::start(const ParamSpace& space, const plan::Bucket& bucket) {
  const int64_t row = bucket.shard_end - bucket.shard_begin;
  arrive(space, space.row_in(space.lp, bucket));
  const at::Tensor all = space.lp.data.narrow(0, space.map.full_begin(bucket), space.map.parts * row);
  const std::string& tag = store_.spec(space.params[bucket.first_param]).name;
  const comm::CommunicatorPtr& ranks = space.ranks().shard;
  const at::Tensor mine = all.narrow(0, space.rank() * row, row);
  if (options_.collective && ranks->groups()) {
    if (ranks_ != ranks) start_together();
    ranks_ = ranks;
    if (waiting_.empty()) tag_ = tag;
    waiting_.push_back({mine, all});
    waiting_numel_ += all.numel();
    if (waiting_numel_ >= kTogether) start_together();
    return;
  }
  if (options_.collective) {
    started_.push_back(ranks->all_gather(mine, all, tag));
    return;
  }
  for (int64_t rank = 0; rank < space.map.parts; ++rank)
    started_.push_back(ranks->broadcast(all.narrow(0, rank * row, row), static_cast<int>(rank), tag));
}

void StepGather::start_together() {
  if (!waiting_.empty()) started_.push_back(ranks_->all_gather(std::exchange(waiting_, {}), tag_));
  waiting_numel_ = 0;
}

void StepGather::start_all(const ParamSpace& space) {
  for (auto bucket = space.map.buckets.rbegin(); bucket != space.map.buckets.rend(); ++bucket) start(space, *bucket);
}

void StepGather::finish() {
  const InPhase waiting(*store_.storage()->clock(), Phase::kGathers);
  start_together();
  for (const comm::WorkPtr& work : started_) work->wait();
  started_.clear();
  for (const ParamSpace& space : store_.spaces()) arrive(space, {0, space.lp.numel});
}

// Rows that were computed elsewhere are written back in the background: a reader waits for them. Rows that do not rest
// in memory are read by leases only.
void StepGather::arrive(const ParamSpace& space, plan::Range range) const {
  if (store_.storage()->resting(space.lp.plane, range)) store_.lease(space.lp, range, storage::Access::kRead);
}

}  // namespace ds::zero

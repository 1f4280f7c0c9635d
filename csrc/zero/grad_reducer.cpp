#include "zero/grad_reducer.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "zero/sparse_rows.h"

namespace ds::zero {

int64_t bucket_limit(const ReducerOptions& options, int64_t total_numel, int ranks) {
  // At least a few buckets, or nothing could leave before backward's end; not too small, or latency eats the gain.
  constexpr int64_t kSmallest = 1 << 20;
  const int64_t given = std::max<int64_t>(1, options.bucket_numel);
  return options.overlap && ranks > 1 ? std::min(given, std::max(kSmallest, total_numel / 3)) : given;
}

GradReducer::GradReducer(ParamStore& store, DeviceContext& device, ReducerOptions options)
    : store_(store),
      device_(device),
      slots_(store, device),
      rank_(store.everyone().rank()),
      alone_(store.everyone().alone()),
      options_(options),
      buckets_(grad_buckets(store)),
      bucket_of_(store.size()),
      memory_(device.device()),
      filled_(store.size()),
      was_filled_(store.size()),
      used_(store.size()),
      scaled_(store.size()),
      fires_(store.size()),
      late_(store.size()),
      slot_views_(store.size()) {
  options_.overlap = options_.overlap && !alone_;
  for (size_t b = 0; b < buckets_.size(); ++b)
    for (int32_t param : buckets_[b].params) bucket_of_[param] = static_cast<int32_t>(b);
  late_in_bucket_.assign(buckets_.size(), 0);
  std::vector<int32_t> space_of_bucket;
  for (const GradBucket& bucket : buckets_) space_of_bucket.push_back(bucket.space);
  flags_ = std::make_unique<FlagExchange>(store, space_of_bucket);
  if (options_.find_nonfinite_grads)
    nonfinite_grads_ =
        at::zeros({static_cast<int64_t>(store.size())}, at::TensorOptions().device(device.device()).dtype(at::kDouble));
}

// ---- memory -------------------------------------------------------------------------------------------------------

void GradReducer::need_slots(GradBucket& bucket) {
  if (bucket.slots.defined()) return;
  const ParamSpace& space = this->space(bucket);
  if (space.local.defined()) {
    bucket.slots = space.local.narrow(0, bucket.begin, bucket.numel);
    return;
  }
  bucket.slots = memory_.borrow(bucket.numel, space.grad.data.scalar_type());
  bucket.zero_gaps();
}

// ---- one backward -------------------------------------------------------------------------------------------------

void GradReducer::begin(bool reduce) {
  at::NoGradGuard no_grad;
  if (active()) abort();
  adopt_user_grads();
  make_room();
  if (!reduce) store_.need_local();
  for (size_t param = 0; param < store_.size(); ++param) store_.spec(param).tensor.mutable_grad() = at::Tensor();
  was_filled_ = filled_;
  std::fill(scaled_.begin(), scaled_.end(), 0);
  fires_.begin();
  for (GradBucket& bucket : buckets_) {
    if (!bucket.in_place || !bucket.reduced) continue;
    bucket.reduced = false;
    const double factor = again(bucket);
    if (std::abs(factor - 1.0) < 1e-5) continue;
    const at::Tensor sum = row(bucket);
    device_.copy(sum, sum, static_cast<float>(1.0 / factor));
    dirty_ = true;
  }
  next_bucket_ = 0;
  overlapped_count_ = 0;
  for (GradBucket& bucket : buckets_) {
    bucket.launched = false;
    bucket.work.reset();
    bucket.slots = at::Tensor();
    int32_t known = 0;
    for (int32_t param : bucket.params) known += wanted(bucket, param) > 0;
    bucket.pending = known > 0 || fires_.has_learned() ? known : -1;
  }
  phase_ = reduce ? Phase::kReducing : Phase::kAccumulating;
}

// Local gradients are about to be written: reduced ones must not lie among them.
void GradReducer::make_room() {
  if (holds_reduced_ && store_.grad_buffer_aliased()) store_.split_grad_buffer();
}

void GradReducer::note_nonfinite_grad(size_t param, const at::Tensor& grad) {
  if (!options_.find_nonfinite_grads || !has_kernel_dtype(grad.scalar_type()) || !grad.is_non_overlapping_and_dense())
    return;
  const c10::DeviceGuard current(device_.device());
  const kernels::Segment segment{grad.data_ptr(), static_cast<size_t>(grad.numel())};
  device_.run([&](const kernels::Launch& launch) {
    device_.table().sum_squares(launch, &segment, 1, kernel_dtype(grad.scalar_type(), "gradient"),
                                static_cast<double*>(nonfinite_grads_.data_ptr()) + param);
  });
}

void GradReducer::absorb(size_t param, const at::Tensor& grad) {
  GradBucket& bucket = buckets_[bucket_of_[param]];
  const float scale = phase_ == Phase::kReducing ? before(bucket) : 1.0f;
  need_slots(bucket);
  if (!filled_[param]) {
    slots_.put(param, bucket.slots, bucket.begin, grad, scale, false);
    filled_[param] = 1;
    scaled_[param] = 1;
  } else {
    slots_.put(param, bucket.slots, bucket.begin, grad, scaled_[param] ? scale : 1.0f, true);
  }
}

void GradReducer::on_grad(size_t param) {
  std::lock_guard<std::mutex> lock(mutex_);
  at::Tensor& held = store_.spec(param).tensor.mutable_grad();
  if (!held.defined()) return;
  if (!held.is_sparse()) note_nonfinite_grad(param, held);
  if (phase_ == Phase::kIdle) {
    at::NoGradGuard no_grad;
    // A backward that nobody announced (of a graph that the engine's forward did not build): keep it, reduce at step.
    make_room();
    store_.need_local();
    const bool ours = attaches(param) && !held.is_sparse() && held.data_ptr() == slot_view(param).data_ptr();
    if (!ours) {
      scaled_[param] = 0;
      GradBucket& bucket = buckets_[bucket_of_[param]];
      bucket.slots = at::Tensor();
      absorb(param, held);
      bucket.slots = at::Tensor();
      held = attaches(param) ? slot_view(param) : at::Tensor();
    }
    dirty_ = true;
    return;
  }
  const at::Tensor grad = std::move(held);
  held = at::Tensor();
  const int32_t times = fires_.fired(param);
  GradBucket& bucket = buckets_[bucket_of_[param]];
  if (bucket.launched) {
    at::NoGradGuard no_grad;
    const ParamSpec& spec = store_.spec(param);
    if (!late_[param].defined()) {
      const auto options = store_.space_of(param).grad.data.options();
      late_[param] = at::empty_strided(spec.sizes(), spec.strides(), options);
      late_[param].zero_();
    }
    device_.accumulate(late_[param], grad, before(bucket));
    return;
  }
  absorb(param, grad);
  if (phase_ == Phase::kReducing && (options_.overlap || bucket.eager) && times == wanted(bucket, param) &&
      bucket.pending > 0 && --bucket.pending == 0)
    launch_ready();
}

void GradReducer::launch_ready() {
  at::NoGradGuard no_grad;
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0) {
    launch(buckets_[next_bucket_++]);
    collect_earlier(buckets_[next_bucket_ - 1]);
    ++overlapped_count_;
  }
}

// ---- reduction ----------------------------------------------------------------------------------------------------

at::Tensor GradReducer::row(const GradBucket& bucket) {
  const ParamSpace& space = this->space(bucket);
  return space.grad.data.narrow(0, space.offset_in(space.grad, bucket.plan, bucket.plan.shard_begin),
                                bucket.plan.shard_end - bucket.plan.shard_begin);
}

void GradReducer::launch(GradBucket& bucket) {
  bucket.launched = true;
  if (summed(bucket)) return;
  need_slots(bucket);
  const float scale = before(bucket);
  for (int32_t param : bucket.params) {
    if (!filled_[param]) {
      slots_.zero(param, bucket.slots, bucket.begin);
    } else if (!scaled_[param] && scale != 1.0f) {
      slots_.scale(param, bucket.slots, bucket.begin, scale);
    }
  }
  if (!bucket.by_rows) start_reduction(bucket);  // else complete() does
}

std::string GradReducer::tag(const GradBucket& bucket) const {
  return bucket.params.empty() ? "" : store_.spec(bucket.params.front()).name;
}

void GradReducer::start_reduction(GradBucket& bucket) {
  const SpaceRanks& among = ranks(bucket);
  at::Tensor sent = bucket.slots;
  if (options_.comm_dtype && *options_.comm_dtype != sent.scalar_type()) {
    bucket.wire = memory_.borrow(bucket.numel, *options_.comm_dtype);
    device_.copy(bucket.wire, sent, 1.0f);
    sent = bucket.wire;
  }
  if (bucket.in_place) {  // this rank's row is the bucket; nothing is left for complete() but the result
    bucket.received = sent;
    if (among.replicas->size() > 1) bucket.work = among.replicas->all_reduce(sent, comm::ReduceOp::kSum, tag(bucket));
    return;
  }
  if (!options_.scatter) {
    bucket.work = among.shard->all_reduce(sent, comm::ReduceOp::kSum, tag(bucket));
    return;
  }
  const at::Tensor target = row(bucket);
  const bool direct = target.scalar_type() == sent.scalar_type() || target.scalar_type() == at::kFloat;
  const at::ScalarType type = direct ? target.scalar_type() : sent.scalar_type();
  bucket.received = direct && !bucket.reduced ? target : memory_.borrow(target.numel(), type);
  bucket.work = among.shard->reduce_scatter(sent, bucket.received, tag(bucket));
}

// The slots of buckets that have been sent are free again.
void GradReducer::collect_earlier(const GradBucket& latest) {
  for (size_t b = 0; b < next_bucket_; ++b) {
    GradBucket& bucket = buckets_[b];
    if (!bucket.work || !bucket.eager) continue;
    const bool earlier = &bucket != &latest;
    if (bucket.work->ready() || (options_.waits && (earlier || !options_.overlap))) collect(bucket);
  }
}

// This rank's row of the sum is in `received` afterwards, and what was sent is free where it lies elsewhere.
void GradReducer::collect(GradBucket& bucket) {
  if (bucket.work) bucket.work->wait();
  bucket.work.reset();
  if (bucket.in_place) {
    bucket.wire = at::Tensor();
    return;
  }
  if (!options_.scatter) {
    const int64_t numel = bucket.plan.shard_end - bucket.plan.shard_begin;
    const at::Tensor& sum = bucket.wire.defined() ? bucket.wire : bucket.slots;
    bucket.received = memory_.borrow(numel, sum.scalar_type());
    bucket.received.copy_(sum.narrow(0, space(bucket).rank() * numel, numel));
  }
  bucket.wire = at::Tensor();
  bucket.slots = at::Tensor();
}

void GradReducer::complete(GradBucket& bucket) {
  const SpaceRanks& among = ranks(bucket);
  if (bucket.by_rows) {
    const auto param = static_cast<size_t>(bucket.params.front());
    const at::Tensor grad = store_.grad_view(param);
    if (filled_[param])  // by any rank
      reduce_rows(*among.replicas, grad, after(bucket), options_.comm_dtype.value_or(grad.scalar_type()), tag(bucket));
    return;
  }
  if (bucket.work) collect(bucket);
  if (!bucket.received.defined()) return;
  const at::Tensor target = row(bucket);
  if (!bucket.in_place && among.replicas->size() > 1)
    among.replicas->all_reduce(bucket.received, comm::ReduceOp::kSum, tag(bucket))->wait();
  const bool there = bucket.received.data_ptr() == target.data_ptr();
  if (bucket.reduced && !bucket.in_place) {
    device_.accumulate(target, bucket.received, after(bucket));
  } else if (!there || after(bucket) != 1.0f) {
    device_.copy(target, bucket.received, after(bucket));
  }
  bucket.received = bucket.wire = at::Tensor();
  bucket.reduced = true;
  holds_reduced_ = holds_reduced_ || !bucket.in_place;
}

// Learns what any rank has; true when some rank has a late gradient.
bool GradReducer::exchange_flags() {
  BackwardFlags flags;
  flags.used.resize(store_.size());
  flags.late.resize(buckets_.size());
  for (size_t param = 0; param < store_.size(); ++param) {
    flags.used[param] = filled_[param] || late_[param].defined() ? 1.0f : 0.0f;
    flags.late[bucket_of_[param]] += late_[param].defined() ? 1.0f : 0.0f;
  }
  if (device_.failed()) flags.failed_ranks = {1.0f, static_cast<float>(rank_ + 1)};
  flags_->sum(flags);
  failed_ranks_ = flags.failed_ranks;
  for (size_t param = 0; param < store_.size(); ++param) {
    const bool any = flags.used[param] > 0.0f, in_place = buckets_[bucket_of_[param]].in_place;
    filled_[param] = in_place && any;
    used_[param] = !in_place && (used_[param] || any);
  }
  late_count_ = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    late_in_bucket_[b] = static_cast<int32_t>(flags.late[b]);
    late_count_ += late_in_bucket_[b];
  }
  return late_count_ > 0;
}

void GradReducer::late_round() {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (late_in_bucket_[b] == 0) continue;
    GradBucket& bucket = buckets_[b];
    const SpaceRanks& among = ranks(bucket);
    const at::Tensor target = row(bucket);
    const at::Tensor round = at::zeros({bucket.numel}, target.options());
    for (int32_t param : bucket.params)
      if (late_[param].defined()) slots_.put(param, round, bucket.begin, late_[param], 1.0f, false);
    at::Tensor sum = round;
    if (!bucket.in_place) {
      sum = at::empty_like(target);
      among.shard->reduce_scatter(round, sum, tag(bucket))->wait();
    }
    if (among.replicas->size() > 1) among.replicas->all_reduce(sum, comm::ReduceOp::kSum, tag(bucket))->wait();
    device_.accumulate(target, sum, after(bucket));
  }
}

void GradReducer::end() {
  if (!active()) return;
  at::NoGradGuard no_grad;
  if (phase_ == Phase::kReducing) {
    late_count_ = 0;
    while (next_bucket_ < buckets_.size()) launch(buckets_[next_bucket_++]);
    const bool late = exchange_flags();
    for (const Abandoned& one : abandoned_) one.work->wait();  // all ranks are here, so all have launched them
    abandoned_.clear();
    for (GradBucket& bucket : buckets_)
      if (!summed(bucket)) complete(bucket);
    if (late) late_round();
    std::fill(late_.begin(), late_.end(), at::Tensor());
    dirty_ = false;
    store_.drop_local();
  } else {
    dirty_ = dirty_ || fires_.any();
  }
  for (GradBucket& bucket : buckets_) bucket.slots = at::Tensor();
  fires_.learn();
  attach_grads();
  phase_ = Phase::kIdle;
  if (failed_ranks_[0] == 0.0f) return;
  // Of one backward, and everything added to them before: what a kernel has left out cannot be told from the rest.
  clear();
  const std::array<float, 2> ranks = std::exchange(failed_ranks_, {});
  fail(ErrorKind::kRuntime, failure_text(device_.take_failure(), ranks.data(), rank_),
       " The gradients since the last step are dropped, on every rank.");
}

bool GradReducer::abort() {
  if (!active()) return false;
  at::NoGradGuard no_grad;
  bool in_flight = false, lost = false;
  for (GradBucket& bucket : buckets_) {
    if (bucket.work) {
      in_flight = true;
      abandoned_.push_back({std::move(bucket.work), bucket.slots, bucket.wire, bucket.received});
      bucket.work.reset();
    }
    bucket.wire = at::Tensor();
    bucket.received = at::Tensor();
    bucket.slots = at::Tensor();
    if (!bucket.launched || summed(bucket)) continue;
    for (int32_t param : bucket.params) {
      lost = lost || was_filled_[param];
      was_filled_[param] = 0;
    }
  }
  // Other ranks may never join what this one launched: do not wait, leave the memory to the collectives. Nor may they
  // be dropped: a transfer that lost its buffer half-way blocks gloo's connection for good.
  if (in_flight) {
    for (ParamSpace& space : store_.spaces()) {
      const bool shared = space.local.is_same(space.grad.data);
      space.grad.data = space.grad.data.clone();
      if (space.local.defined()) space.local = shared ? space.grad.data : space.local.clone();
    }
    std::fill(slot_views_.begin(), slot_views_.end(), at::Tensor());
  }
  filled_ = was_filled_;
  std::fill(late_.begin(), late_.end(), at::Tensor());
  attach_grads();
  phase_ = Phase::kIdle;
  return lost;
}

void GradReducer::finish() {
  at::NoGradGuard no_grad;
  if (active()) end();
  adopt_user_grads();
  if (!dirty_ || std::all_of(buckets_.begin(), buckets_.end(), [&](const GradBucket& b) { return summed(b); })) return;
  begin(true);
  end();
}

void GradReducer::join() {
  if (alone_) return;
  const bool learned = fires_.has_learned();
  begin(true);
  end();
  fires_.forget_last(learned);
}

bool GradReducer::any() const {
  for (size_t param = 0; param < store_.size(); ++param)
    if (filled_[param] || used_[param] || store_.spec(param).tensor.grad().defined()) return true;
  return false;
}

void GradReducer::clear() {
  std::fill(filled_.begin(), filled_.end(), 0);
  std::fill(used_.begin(), used_.end(), 0);
  for (GradBucket& bucket : buckets_) bucket.reduced = false;
  holds_reduced_ = false;
  store_.alias_grad_buffer();
  for (size_t param = 0; param < store_.size(); ++param) store_.spec(param).tensor.mutable_grad() = at::Tensor();
  dirty_ = false;
  if (nonfinite_grads_.defined()) nonfinite_grads_.zero_();
}

std::vector<GradReducer::NonfiniteGrad> GradReducer::local_nonfinite_grads() const {
  std::vector<NonfiniteGrad> found;
  if (!nonfinite_grads_.defined()) return found;
  const at::Tensor sums = nonfinite_grads_.to(at::kCPU);
  for (size_t param = 0; param < store_.size(); ++param) {
    const double sum = sums.data_ptr<double>()[param];
    if (!std::isfinite(sum)) found.push_back({static_cast<int32_t>(param), std::isnan(sum)});
  }
  return found;
}

}  // namespace ds::zero

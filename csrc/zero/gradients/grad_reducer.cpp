#include "zero/gradients/grad_reducer.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "base/blocking_region.h"
#include "base/error.h"
#include "base/ranges.h"
#include "zero/gradients/one_use.h"

namespace ds::zero {

namespace {

constexpr size_t kUnderWay = 2;  // buckets that have left and keep their slots

}  // namespace

GradReducer::GradReducer(ParamStore& store, DeviceContext& device, ReducerOptions options)
    : store_(store),
      device_(device),
      slots_(store, device, nonfinite_),
      views_(store, device),
      rank_(store.everyone().rank()),
      options_(options),
      reduction_(store, device, options_),
      buckets_(grad_buckets(store)),
      stays_(all_of(buckets_, [&](const GradBucket& bucket) { return reduction_.summed(bucket); })),
      bucket_of_(store.size()),
      filled_(store.size()),
      used_(store.size()),
      late_(store.size()),
      grad_uses_(store.size()),
      nonfinite_(device, store.size(), options.find_nonfinite_grads) {
  options_.overlap = options_.overlap && !store.alone();
  for (GradBucket& bucket : buckets_) reduction_.choose_way(bucket);
  for (size_t b = 0; b < buckets_.size(); ++b)
    for (int32_t param : buckets_[b].params) bucket_of_[param] = static_cast<int32_t>(b);
  std::vector<int32_t> space_of_bucket;
  for (const GradBucket& bucket : buckets_) space_of_bucket.push_back(bucket.space);
  flags_ = std::make_unique<FlagExchange>(store, space_of_bucket);
}

// ---- one backward -------------------------------------------------------------------------------------------------

void GradReducer::begin(bool reduce) {
  at::NoGradGuard no_grad;
  if (active()) abort();
  withdraw();
  if (ask_local_) options_.local = ask_local_();
  if (reduce && listener_ && listener_->wanted()) arrivals_ = Arrivals::kWanted;
  adopt_user_grads();
  make_room();
  if (!reduce) store_.need_local();
  views_.detach();
  for (size_t param = 0; param < store_.size(); ++param) {
    if (filled(param)) {
      filled_[param] = SlotState::kEarlier;
    } else {
      views_.forget(param);
    }
  }
  grad_uses_.begin();
  next_bucket_ = 0;
  counts_.overlapped = 0;
  for (GradBucket& bucket : buckets_) {
    bucket.enter(BucketState::kFilling);
    bucket.slots = at::Tensor();
    if (bucket.in_place && std::exchange(bucket.row_holds, false)) undo_sum(bucket);
    bucket.pending = -1;
    if (!options_.overlap && !bucket.eager && !arrives(bucket)) continue;
    int32_t known = 0;
    for (int32_t param : bucket.params) known += grad_uses_.wanted(param, bucket.eager) > 0;
    if (known > 0 || grad_uses_.has_learned()) bucket.pending = known;
  }
  phase_ = reduce ? Phase::kReducing : Phase::kAccumulating;
}

// In place: the next reduction adds up what this rank has once more, so a sum that it would change is divided first.
void GradReducer::undo_sum(const GradBucket& bucket) {
  const double factor = reduction_.again(bucket);
  if (std::abs(factor - 1.0) < 1e-5) return;
  const at::Tensor sum = reduction_.row(bucket);
  device_.copy(sum, sum, static_cast<float>(1.0 / factor));
  dirty_ = true;
}

// Local gradients are about to be written: reduced ones must not lie among them.
void GradReducer::make_room() {
  if (!store_.grad_buffer_aliased()) return;
  const auto holds = [](const GradBucket& bucket) { return bucket.row_holds && !bucket.in_place; };
  if (any_of(buckets_, holds)) store_.split_grad_buffer();
}

void GradReducer::absorb(size_t param, const at::Tensor& grad) {
  GradBucket& bucket = bucket_of(param);
  const float scale = phase_ == Phase::kReducing ? reduction_.before(bucket) : 1.0f;
  const SlotState held = filled_[param];
  reduction_.need_slots(bucket, slots_);
  slots_.put(param, bucket.slots, bucket.begin, grad, held == SlotState::kEarlier ? 1.0f : scale,
             held != SlotState::kEmpty);
  if (held == SlotState::kEmpty) filled_[param] = SlotState::kCurrent;
}

void GradReducer::on_grad(size_t param) {
  const auto lock = locked(mutex_);
  at::Tensor& held = store_.spec(param).tensor.mutable_grad();
  if (!held.defined()) return;
  const bool in_time = phase_ == Phase::kIdle || bucket_of(param).state() == BucketState::kFilling;
  if (!slots_.defers() || !in_time) nonfinite_.note({param}, {held});  // else the slots do, for several at a time
  if (phase_ == Phase::kIdle) {
    at::NoGradGuard no_grad;
    // A backward that nobody announced (of a graph that the engine's forward did not build): keep it, reduce at step.
    make_room();
    store_.need_local();
    const bool ours = views_.shows(param) && !held.is_sparse() && held.data_ptr() == views_.slot(param).data_ptr();
    if (!ours) {
      if (views_.shows(param)) {  // the user has taken what was there, or put this there
        filled_[param] = SlotState::kEmpty;
        views_.forget(param);
      }
      bucket_of(param).slots = at::Tensor();
      absorb(param, held);
      slots_.settle();
      bucket_of(param).slots = at::Tensor();
      held = views_.shows(param) ? views_.slot(param) : at::Tensor();
    }
    dirty_ = true;
    return;
  }
  const at::Tensor grad = std::exchange(held, at::Tensor());
  GradBucket& bucket = bucket_of(param);
  if (bucket.state() == BucketState::kArrived && reduction_.summed(bucket)) changes(bucket);
  if (bucket.state() != BucketState::kFilling) {
    at::NoGradGuard no_grad;
    if (!late_[param].defined()) {
      const ParamSpec& spec = store_.spec(param);
      const auto options = at::TensorOptions().device(store_.device()).dtype(store_.space_of(param).grad.dtype);
      late_[param] = at::empty_strided(spec.sizes(), spec.strides(), options).zero_();
    }
    device_.accumulate(late_[param], grad, reduction_.before(bucket));
  } else {
    absorb(param, grad);
  }
  OneUse::here() ? OneUse::here()->add(*this, param) : count(param);
}

void GradReducer::end_use(size_t param) {
  const auto lock = locked(mutex_);
  if (active()) count(param);
}

void GradReducer::count(size_t param) {
  const int32_t times = grad_uses_.fired(param);
  GradBucket& bucket = bucket_of(param);
  if (bucket.state() == BucketState::kFilling && phase_ == Phase::kReducing &&
      (options_.overlap || bucket.eager || arrives(bucket)) && times == grad_uses_.wanted(param, bucket.eager) &&
      bucket.pending > 0 && --bucket.pending == 0)
    launch_ready();
}

void GradReducer::launch_ready() {
  at::NoGradGuard no_grad;
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0) {
    if (reduction_.summed(buckets_[next_bucket_])) {  // nothing travels, and more may come
      GradBucket& own = buckets_[next_bucket_++];
      if (arrives(own)) arrive(own);
      continue;
    }
    launch(buckets_[next_bucket_]);
    ++next_bucket_;  // it has left; one for which there was no memory leaves in abort_together()
    ++counts_.overlapped;
    // The slots of buckets that have been sent are free again.
    for (size_t b = 0; b < next_bucket_; ++b) {
      GradBucket& bucket = buckets_[b];
      if (bucket.state() != BucketState::kLaunched || !(bucket.eager || arrives(bucket))) continue;
      const bool earlier = b + kUnderWay < next_bucket_;
      const bool due = earlier || !options_.overlap || bucket.work->ended();
      if (!due || !(options_.waits || bucket.work->ready())) continue;
      reduction_.collect(bucket);
      if (arrives(bucket)) arrive(bucket);
    }
  }
}

// ---- rows that are complete before the end ------------------------------------------------------------------------

bool GradReducer::arrives(const GradBucket& bucket) const {
  return arrivals_ != Arrivals::kUnwanted && !bucket.way->at_end() &&
         (reduction_.summed(bucket) || bucket.way->gives_row());
}

void GradReducer::arrive(GradBucket& bucket) {
  slots_.settle();
  if (!reduction_.summed(bucket)) {
    if (bucket.row_holds) bucket.before = reduction_.copy_of_row(bucket);
    reduction_.complete(bucket, true);
  }
  std::vector<int32_t> used;
  for (int32_t param : bucket.params)
    if (filled(param) || used_[param]) used.push_back(param);
  bucket.enter(BucketState::kArrived);
  arrivals_ = Arrivals::kTold;
  listener_->arrived(bucket.space, bucket.number, used);
}

// A bucket that is its own sum may be filled again. Nobody hears of buckets that have been withdrawn.
void GradReducer::changes(GradBucket& bucket) {
  if (bucket.state() != BucketState::kArrived || arrivals_ != Arrivals::kTold) return;
  listener_->changed(bucket.space, bucket.number);
  if (reduction_.summed(bucket)) bucket.enter(BucketState::kFilling);
}

void GradReducer::withdraw() {
  if (std::exchange(arrivals_, Arrivals::kUnwanted) == Arrivals::kTold) listener_->withdrawn();
}

// ---- reduction ----------------------------------------------------------------------------------------------------

void GradReducer::launch(GradBucket& bucket) {
  if (reduction_.summed(bucket)) return;
  reduction_.need_slots(bucket, slots_);
  if (reduction_.reads_slots(bucket)) slots_.settle();
  const float scale = reduction_.before(bucket);
  for (int32_t param : bucket.params) {
    if (!filled(param)) {
      slots_.zero(param, bucket.slots, bucket.begin);
    } else if (filled_[param] == SlotState::kEarlier && scale != 1.0f) {
      slots_.scale(param, bucket.slots, bucket.begin, scale);
    }
  }
  reduction_.start(bucket);
  bucket.enter(BucketState::kLaunched);
}

// Learns what any rank has, and what came late.
void GradReducer::exchange_flags() {
  BackwardFlags flags;
  flags.used.resize(store_.size());
  flags.late.resize(buckets_.size());
  for (size_t param = 0; param < store_.size(); ++param) {
    flags.used[param] = filled(param) || late_[param].defined() ? 1.0f : 0.0f;
    flags.late[bucket_of_[param]] += late_[param].defined() ? 1.0f : 0.0f;
  }
  flags.failed_ranks = failed_rank(device_, rank_);
  flags.agreed = agreement_.bits();
  flags_->sum(flags);
  agreed_ = Agreement::agrees(flags.agreed);
  failed_ranks_ = flags.failed_ranks;
  for (size_t param = 0; param < store_.size(); ++param) {
    if (flags.used[param] == 0.0f) continue;
    if (!bucket_of(param).in_place) {
      used_[param] = 1;
    } else if (!filled(param)) {
      filled_[param] = SlotState::kCurrent;
    }
  }
  counts_.late = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    buckets_[b].late = static_cast<int32_t>(flags.late[b]);
    counts_.late += buckets_[b].late;
  }
}

// Reduces the buckets that have not left yet, and exchanges the flags of all ranks.
void GradReducer::reduce_rest() {
  for (; next_bucket_ < buckets_.size(); ++next_bucket_) launch(buckets_[next_bucket_]);
  slots_.settle();
  exchange_flags();
  for (const Abandoned& one : abandoned_) one.work->wait();  // all ranks are here, so all have launched them
  abandoned_.clear();
  for (GradBucket& bucket : buckets_) reduction_.send_again(bucket);
  for (GradBucket& bucket : buckets_)
    if (bucket.state() != BucketState::kFilling && bucket.state() != BucketState::kArrived)
      reduction_.complete(bucket, filled(bucket.params.front()));
  for (GradBucket& bucket : buckets_) {
    if (bucket.late == 0) continue;
    changes(bucket);
    reduction_.add_late(bucket, slots_, late_);
  }
  fill(late_, at::Tensor());
  for (size_t param = 0; param < store_.size(); ++param)
    if (!bucket_of(param).in_place) filled_[param] = SlotState::kEmpty;  // it is in the reduced gradients
}

// The end of a backward; failed_ranks_ says whether it has failed.
void GradReducer::close() {
  slots_.settle();
  if (phase_ == Phase::kReducing) {
    counts_.late = 0;
    if (stays_) {
      failed_ranks_ = failed_rank(device_, rank_);
    } else {
      reduce_rest();
    }
    dirty_ = false;
    store_.drop_local();
  } else {
    dirty_ = dirty_ || grad_uses_.any();
  }
  for (GradBucket& bucket : buckets_) bucket.slots = bucket.before = at::Tensor();
  if (failed_ranks_[0] == 0.0f) grad_uses_.learn();  // one that raised on a rank has not fired everything there
  views_.attach(filled_);
  phase_ = Phase::kIdle;
  if (failed_ranks_[0] == 0.0f && agreed_) return arrivals_ == Arrivals::kTold ? listener_->ended() : void();
  withdraw();
  // A kernel failed on some rank. Drop all gradients since the last step, because the valid ones cannot be told apart.
  clear();
}

void GradReducer::end() {
  if (!active()) return;
  at::NoGradGuard no_grad;
  close();
  const bool agreed = std::exchange(agreed_, true);
  if (failed_ranks_[0] == 0.0f && agreed) return;
  const std::string dropped = " The gradients since the last step are dropped, on every rank.";
  if (failed_ranks_[0] == 0.0f) agreement_.refuse(store_.everyone(), store_.device(), dropped);
  const std::array<float, 2> ranks = std::exchange(failed_ranks_, {});
  fail(ErrorKind::kRuntime, failure_text(device_.take_failure(), ranks.data(), rank_), dropped);
}

bool GradReducer::abort_together() {
  if (phase_ != Phase::kReducing || stays_ || store_.alone()) return abort();
  at::NoGradGuard no_grad;
  const bool lost = any_of(used_, [](uint8_t used) { return used != 0; }) ||
                    any_of(filled_, [](SlotState slot) { return slot == SlotState::kEarlier; });
  device_.note_failure("the backward has raised");
  // One bucket at a time: it may have raised because there was no memory.
  for (; next_bucket_ < buckets_.size(); ++next_bucket_) {
    GradBucket& bucket = buckets_[next_bucket_];
    launch(bucket);
    slots_.settle();
    if (bucket.state() == BucketState::kLaunched && !bucket.way->at_end()) reduction_.collect(bucket);
  }
  close();
  failed_ranks_ = {};
  agreed_ = true;
  device_.take_failure();  // the caller knows
  return lost;
}

bool GradReducer::abort() {
  if (!active()) return false;
  at::NoGradGuard no_grad;
  bool in_flight = false, lost = false;
  slots_.settle();
  withdraw();
  for (GradBucket& bucket : buckets_) {
    const BucketState was = bucket.state();
    bucket.enter(BucketState::kAbandoned);
    if (bucket.work) {
      in_flight = true;
      abandoned_.push_back({std::move(bucket.work), bucket.slots, bucket.wire, bucket.received});
      bucket.work.reset();
    }
    if (was == BucketState::kArrived && !reduction_.summed(bucket)) {
      if (bucket.before.defined()) reduction_.put_row(bucket, bucket.before);
      bucket.row_holds = bucket.before.defined();
    }
    bucket.before = bucket.slots = bucket.wire = bucket.received = at::Tensor();
    if (was == BucketState::kFilling || reduction_.summed(bucket)) continue;
    for (int32_t param : bucket.params) {
      lost = lost || filled_[param] == SlotState::kEarlier;
      filled_[param] = SlotState::kEmpty;
    }
  }
  // Other ranks may never join what this one launched: do not wait, leave the memory to the collectives. Nor may they
  // be dropped: a transfer that lost its buffer half-way blocks gloo's connection for good.
  if (in_flight) {
    store_.renew_grad_buffers();
    views_.forget_slots();
  }
  for (SlotState& slot : filled_)
    if (slot == SlotState::kCurrent) slot = SlotState::kEmpty;
  fill(late_, at::Tensor());
  views_.attach(filled_);
  phase_ = Phase::kIdle;
  return lost;
}

void GradReducer::finish() {
  at::NoGradGuard no_grad;
  if (active()) end();
  adopt_user_grads();
  if (!dirty_ || stays_) return;
  begin(true);
  end();
}

void GradReducer::join() {
  if (store_.alone()) return;
  const bool learned = grad_uses_.has_learned();
  begin(true);
  end();
  grad_uses_.forget_last(learned);
}

void GradReducer::clear() {
  if (active()) abort();
  arrivals_ = Arrivals::kUnwanted;
  for (GradBucket& bucket : buckets_) {
    bucket.enter(BucketState::kFilling);
    bucket.row_holds = false;
  }
  fill(filled_, SlotState::kEmpty);
  fill(used_, 0);
  store_.alias_grad_buffer();
  views_.detach();
  for (size_t param = 0; param < store_.size(); ++param) views_.forget(param);
  store_.free_grads();
  dirty_ = false;
  nonfinite_.clear();
}

}  // namespace ds::zero

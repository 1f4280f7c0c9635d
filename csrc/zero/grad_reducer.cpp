#include "zero/grad_reducer.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

namespace ds::zero {

GradReducer::GradReducer(ParamStore& store, DeviceContext& device, comm::CommunicatorPtr communicator,
                         ReducerOptions options)
    : store_(store),
      device_(device),
      communicator_(std::move(communicator)),
      options_(options),
      bucket_of_(store.size()),
      filled_(store.size()),
      was_filled_(store.size()),
      scaled_(store.size()),
      fires_(store.size()),
      expected_(store.size()),
      late_(store.size()) {
  options_.overlap = options_.overlap && communicator_->size() > 1;
  int64_t total = 0;
  for (const FlatSpace& space : store.spaces()) total += space.layout.total_numel;
  // At least a few buckets, or nothing could leave before backward's end; not too small, or latency eats the gain.
  constexpr int64_t kSmallest = 1 << 20;
  const int64_t cap =
      options_.overlap ? std::min(options_.bucket_numel, std::max(kSmallest, total / 3)) : options_.bucket_numel;
  for (size_t s = 0; s < store.spaces().size(); ++s) {
    const FlatSpace& space = store.spaces()[s];
    for (const plan::Bucket& plan : plan::bucket_plan(space.layout, cap)) {
      BucketState bucket;
      bucket.space = static_cast<int32_t>(s);
      bucket.plan = plan;
      for (int32_t i = plan.first_param; i <= plan.last_param; ++i) bucket.params.push_back(space.params[i]);
      buckets_.push_back(std::move(bucket));
    }
  }
  // A bucket is complete when its first parameter in the module has its gradient, since backward goes from last to
  // first.
  const auto first_order = [&](const BucketState& bucket) {
    int32_t first = store_.spec(bucket.params[0]).order;
    for (int32_t param : bucket.params) first = std::min(first, store_.spec(param).order);
    return first;
  };
  std::stable_sort(buckets_.begin(), buckets_.end(),
                   [&](const BucketState& a, const BucketState& b) { return first_order(a) > first_order(b); });
  for (size_t b = 0; b < buckets_.size(); ++b)
    for (int32_t param : buckets_[b].params) bucket_of_[param] = static_cast<int32_t>(b);
  if (options_.find_culprits)
    culprits_ =
        at::zeros({static_cast<int64_t>(store.size())}, at::TensorOptions().device(device.device()).dtype(at::kDouble));
}

bool GradReducer::attaches(size_t param) const {
  const FlatSpace& space = store_.spaces()[store_.place(param).space];
  return space.grad.scalar_type() == space.dtype;
}

void GradReducer::attach_grads() {
  for (size_t param = 0; param < store_.size(); ++param) {
    at::Tensor& grad = store_.spec(param).tensor.mutable_grad();
    if (filled_[param] && attaches(param)) {
      grad = store_.grad_view(param);
    } else {
      grad = at::Tensor();
    }
  }
}

// Between backward and step the user may edit .grad in place, replace it or drop it: all of that counts.
void GradReducer::adopt_user_grads() {
  for (size_t param = 0; param < store_.size(); ++param) {
    at::Tensor& grad = store_.spec(param).tensor.mutable_grad();
    if (!grad.defined()) {
      if (attaches(param)) filled_[param] = 0;
      continue;
    }
    const at::Tensor slot = store_.grad_view(param);
    const bool ours = attaches(param) && !grad.is_sparse() && grad.data_ptr() == slot.data_ptr();
    if (!ours) device_.copy(slot, grad, 1.0f);
    filled_[param] = 1;
    if (!attaches(param)) grad = at::Tensor();
  }
}

void GradReducer::begin(bool reduce) {
  at::NoGradGuard no_grad;
  if (active()) abort();
  adopt_user_grads();
  for (size_t param = 0; param < store_.size(); ++param) store_.spec(param).tensor.mutable_grad() = at::Tensor();
  was_filled_ = filled_;
  std::fill(scaled_.begin(), scaled_.end(), 0);
  std::fill(fires_.begin(), fires_.end(), 0);
  next_bucket_ = 0;
  overlapped_count_ = 0;
  for (BucketState& bucket : buckets_) {
    bucket.launched = false;
    bucket.work.reset();
    int32_t known = 0;
    for (int32_t param : bucket.params) known += expected_[param] > 0;
    bucket.pending = known > 0 || learned_ ? known : -1;
  }
  phase_ = reduce ? Phase::kReducing : Phase::kAccumulating;
}

void GradReducer::note_culprit(size_t param, const at::Tensor& grad) {
  if (!options_.find_culprits || !has_kernel_dtype(grad.scalar_type()) || !grad.is_non_overlapping_and_dense()) return;
  const c10::DeviceGuard current(device_.device());
  const kernels::Segment segment{grad.data_ptr(), static_cast<size_t>(grad.numel())};
  device_.table().sum_squares(device_.launch(), &segment, 1, kernel_dtype(grad.scalar_type(), "gradient"),
                              static_cast<double*>(culprits_.data_ptr()) + param);
}

void GradReducer::absorb(size_t param, const at::Tensor& grad) {
  const float scale = phase_ == Phase::kReducing && communicator_->size() > 1 ? options_.predivide : 1.0f;
  const at::Tensor slot = store_.grad_view(param);
  if (!filled_[param]) {
    device_.copy(slot, grad, scale);
    filled_[param] = 1;
    scaled_[param] = 1;
  } else {
    device_.accumulate(slot, grad, scaled_[param] ? scale : 1.0f);
  }
}

void GradReducer::on_grad(size_t param) {
  at::NoGradGuard no_grad;
  std::lock_guard<std::mutex> lock(mutex_);
  at::Tensor& held = store_.spec(param).tensor.mutable_grad();
  if (!held.defined()) return;
  if (!held.is_sparse()) note_culprit(param, held);
  if (phase_ == Phase::kIdle) {
    // A backward that nobody announced (of a graph that the engine's forward did not build): keep it, reduce at step.
    const at::Tensor slot = store_.grad_view(param);
    const bool ours = attaches(param) && !held.is_sparse() && held.data_ptr() == slot.data_ptr();
    if (!ours) {
      scaled_[param] = 0;
      absorb(param, held);
      held = attaches(param) ? slot : at::Tensor();
    }
    dirty_ = true;
    return;
  }
  const at::Tensor grad = std::move(held);
  held = at::Tensor();
  ++fires_[param];
  BucketState& bucket = buckets_[bucket_of_[param]];
  if (bucket.launched) {
    if (!late_[param].defined()) late_[param] = at::zeros_like(store_.grad_view(param));
    device_.accumulate(late_[param], grad, options_.predivide);
    return;
  }
  absorb(param, grad);
  if (phase_ == Phase::kReducing && options_.overlap && fires_[param] == expected_[param] && bucket.pending > 0 &&
      --bucket.pending == 0)
    launch_ready();
}

void GradReducer::launch_ready() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0) {
    launch(buckets_[next_bucket_++]);
    ++overlapped_count_;
  }
}

void GradReducer::launch(BucketState& bucket) {
  bucket.launched = true;
  if (communicator_->size() == 1) return;
  FlatSpace& space = store_.spaces()[bucket.space];
  for (int32_t param : bucket.params) {
    if (store_.place(param).numel == 0) continue;
    const at::Tensor slot = store_.grad_view(param);
    if (!filled_[param]) {
      slot.zero_();
    } else if (!scaled_[param] && options_.predivide != 1.0f) {
      device_.copy(slot, slot, options_.predivide);
    }
  }
  at::Tensor part = space.grad.narrow(0, bucket.plan.begin, bucket.plan.end - bucket.plan.begin);
  if (options_.comm_dtype && *options_.comm_dtype != part.scalar_type()) {
    if (!bucket.carrier.defined()) bucket.carrier = at::empty(part.sizes(), part.options().dtype(*options_.comm_dtype));
    device_.copy(bucket.carrier, part, 1.0f);
    part = bucket.carrier;
  }
  bucket.work = communicator_->all_reduce(part, comm::ReduceOp::kSum);
}

void GradReducer::complete(BucketState& bucket) {
  if (!bucket.work) return;
  bucket.work->wait();
  bucket.work.reset();
  FlatSpace& space = store_.spaces()[bucket.space];
  const at::Tensor part = space.grad.narrow(0, bucket.plan.begin, bucket.plan.end - bucket.plan.begin);
  if (bucket.carrier.defined()) {
    device_.copy(part, bucket.carrier, options_.postscale);
  } else if (options_.postscale != 1.0f) {
    device_.copy(part, part, options_.postscale);
  }
}

// Sets filled_ to "some rank has it"; true when some rank has a late gradient.
bool GradReducer::exchange_flags() {
  const auto count = static_cast<int64_t>(store_.size());
  at::Tensor flags = at::zeros({count + 1}, at::TensorOptions().dtype(at::kFloat));
  float* values = flags.data_ptr<float>();
  for (int64_t param = 0; param < count; ++param) {
    values[param] = filled_[param] || late_[param].defined() ? 1.0f : 0.0f;
    values[count] += late_[param].defined() ? 1.0f : 0.0f;
  }
  at::Tensor shared = device_.device().is_cpu() ? flags : flags.to(device_.device());
  communicator_->all_reduce(shared, comm::ReduceOp::kSum)->wait();
  if (!device_.device().is_cpu()) flags.copy_(shared);
  for (int64_t param = 0; param < count; ++param) filled_[param] = values[param] > 0.0f;
  late_count_ = static_cast<int64_t>(values[count]);
  return late_count_ > 0;
}

void GradReducer::late_round() {
  for (FlatSpace& space : store_.spaces()) {
    const at::Tensor round = at::zeros_like(space.grad);
    for (int32_t param : space.params)
      if (late_[param].defined()) device_.copy(store_.view(param, round), late_[param], 1.0f);
    communicator_->all_reduce(round, comm::ReduceOp::kSum)->wait();
    device_.accumulate(space.grad, round, options_.postscale);
  }
}

void GradReducer::learn() {
  for (size_t param = 0; param < store_.size(); ++param) expected_[param] = std::max(expected_[param], fires_[param]);
  learned_ = true;
}

void GradReducer::end() {
  if (!active()) return;
  at::NoGradGuard no_grad;
  if (phase_ == Phase::kReducing) {
    late_count_ = 0;
    while (next_bucket_ < buckets_.size()) launch(buckets_[next_bucket_++]);
    if (communicator_->size() > 1) {
      const bool late = exchange_flags();
      for (BucketState& bucket : buckets_) complete(bucket);
      if (late) late_round();
    }
    std::fill(late_.begin(), late_.end(), at::Tensor());
    dirty_ = false;
  } else {
    dirty_ = dirty_ || std::any_of(fires_.begin(), fires_.end(), [](int32_t n) { return n > 0; });
  }
  learn();
  attach_grads();
  phase_ = Phase::kIdle;
}

bool GradReducer::abort() {
  if (!active()) return false;
  at::NoGradGuard no_grad;
  bool in_flight = false, lost = false;
  for (BucketState& bucket : buckets_) {
    in_flight = in_flight || bucket.work;
    bucket.work.reset();
    bucket.carrier = at::Tensor();
    if (!bucket.launched || communicator_->size() == 1) continue;
    for (int32_t param : bucket.params) {
      lost = lost || was_filled_[param];
      was_filled_[param] = 0;
    }
  }
  // Other ranks may never join what this one launched: do not wait, leave the memory to the collectives.
  if (in_flight)
    for (FlatSpace& space : store_.spaces()) space.grad = space.grad.clone();
  filled_ = was_filled_;
  std::fill(late_.begin(), late_.end(), at::Tensor());
  attach_grads();
  phase_ = Phase::kIdle;
  return lost;
}

void GradReducer::finish() {
  at::NoGradGuard no_grad;
  if (active()) end();
  if (dirty_ && communicator_->size() > 1) {
    begin(true);
    end();
  } else {
    adopt_user_grads();
  }
}

bool GradReducer::any() const {
  for (size_t param = 0; param < store_.size(); ++param)
    if (filled_[param] || store_.spec(param).tensor.grad().defined()) return true;
  return false;
}

void GradReducer::clear() {
  std::fill(filled_.begin(), filled_.end(), 0);
  for (size_t param = 0; param < store_.size(); ++param) store_.spec(param).tensor.mutable_grad() = at::Tensor();
  dirty_ = false;
  if (culprits_.defined()) culprits_.zero_();
}

std::vector<GradReducer::Culprit> GradReducer::local_culprits() const {
  std::vector<Culprit> found;
  if (!culprits_.defined()) return found;
  const at::Tensor sums = culprits_.to(at::kCPU);
  for (size_t param = 0; param < store_.size(); ++param) {
    const double sum = sums.data_ptr<double>()[param];
    if (!std::isfinite(sum)) found.push_back({static_cast<int32_t>(param), std::isnan(sum)});
  }
  return found;
}

}  // namespace ds::zero

#include "zero/gradients/bucket_reduction.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <utility>

namespace ds::zero {

int64_t bucket_limit(const ReducerOptions& options, int64_t total_numel, int ranks, bool on_host) {
  // Several buckets, because the last one leaves when the backward is over and nothing runs beside it, and because a
  // bucket has memory from its first gradient on; not too small, or latency eats the gain.
  constexpr int64_t kSmallest = 1 << 20, kLargest = 50'000'000, kParts = 8;
  const int64_t given = std::max<int64_t>(1, options.bucket_numel);
  const int64_t wanted = std::min(kLargest, std::max(kSmallest, total_numel / kParts));
  const bool sooner = options.overlap && ranks > 1, later = ranks == 1 && !on_host;
  return sooner || later ? std::min(given, wanted) : given;
}

at::Tensor BucketReduction::row(const GradBucket& bucket) const {
  return store_.on_device(space(bucket).grad, space(bucket).row_in(space(bucket).grad, bucket.plan));
}

storage::Lease BucketReduction::lease_row(const GradBucket& bucket, storage::Access access) const {
  const ParamSpace& space = this->space(bucket);
  return store_.lease(space.grad, space.row_in(space.grad, bucket.plan), access);
}

void BucketReduction::zero_row(const GradBucket& bucket) { lease_row(bucket, storage::Access::kWrite).data().zero_(); }

at::Tensor BucketReduction::copy_of_row(const GradBucket& bucket) const {
  const Buffer& grad = space(bucket).grad;
  const plan::Range row = space(bucket).row_in(grad, bucket.plan);
  const storage::Medium at = store_.storage()->resting(grad.plane, row).value_or(storage::Medium::kHost);
  const at::Tensor copy = storage::as_tensor(store_.storage()->scratch(row.numel(), grad.dtype, at));
  return copy.copy_(lease_row(bucket, storage::Access::kRead).data());
}
void BucketReduction::put_row(const GradBucket& bucket, const at::Tensor& values) {
  lease_row(bucket, storage::Access::kWrite).data().copy_(values);
}

// The row becomes the final sum, or grows by it.
void BucketReduction::add_to_row(const GradBucket& bucket, const at::Tensor& values, bool add) {
  storage::Lease lease;
  if (!space(bucket).grad.on_device())
    lease = lease_row(bucket, add ? storage::Access::kUpdate : storage::Access::kWrite);
  const at::Tensor target = lease ? lease.data() : store_.grad_row_to_write(space(bucket), bucket.plan);
  const bool rounds = after(bucket) != 1.0f && values.scalar_type() != target.scalar_type();  // else a copy is exact
  if (add) {
    device_.accumulate(target, beside(target, values), after(bucket));
  } else if (values.data_ptr() != target.data_ptr() || after(bucket) != 1.0f) {
    device_.copy(target, rounds ? beside(target, values) : values, after(bucket));
  }
}

// Values that have travelled through the host, on the device of `target` if that is not the host.
at::Tensor BucketReduction::beside(const at::Tensor& target, const at::Tensor& values) {
  if (target.is_cpu() || !values.is_cpu()) return values;
  return memory_.borrow(values.numel(), values.scalar_type()).copy_(values);
}

void BucketReduction::need_slots(GradBucket& bucket, GradSlots& slots) {
  if (bucket.slots.defined()) return;
  const ParamSpace& space = this->space(bucket);
  if (space.local.exists()) {
    const plan::Range block{bucket.begin, bucket.begin + bucket.numel};
    const bool made = store_.occupy(space.local, block);
    bucket.slots = store_.on_device(space.local, block);
    if (made) slots.zero_gaps(bucket.slots, bucket.gaps);
    return;
  }
  // Without other ranks the slots may be the row itself, unless it holds the sum of earlier micro-steps, to which a
  // backward that raises must not add.
  const bool is_row = ranks(bucket).alone() && space.grad.on_device() && !bucket.row_holds &&
                      bucket.numel == bucket.plan.shard_end - bucket.plan.shard_begin;
  bucket.slots = is_row ? store_.grad_row_to_write(space, bucket.plan) : memory_.borrow(bucket.numel, space.grad.dtype);
  slots.zero_gaps(bucket.slots, bucket.gaps);
}

void BucketReduction::start(GradBucket& bucket) {
  if (bucket.way->at_end()) return;
  at::Tensor sent = bucket.slots;
  if (!options_.local && options_.comm_dtype && *options_.comm_dtype != sent.scalar_type()) {
    bucket.wire = memory_.borrow(bucket.numel, *options_.comm_dtype);
    device_.copy(bucket.wire, sent, 1.0f);
    sent = bucket.wire;
  }
  bucket.way->start(bucket, std::move(sent));
}

void BucketReduction::collect(GradBucket& bucket) {
  if (bucket.work) bucket.work->wait();
  bucket.work.reset();
  bucket.way->receive(bucket);
  bucket.enter(leave_device(bucket) ? BucketState::kLeaving : BucketState::kReceived);
}

// Moves a received row to its placement while the backward runs. The first sum of a row is written in the background; a
// sum that is added to it waits on the host until the backward has ended: one that raises leaves the row as it was.
// Returns whether the row is on its way.
bool BucketReduction::leave_device(GradBucket& bucket) {
  const Buffer& grad = space(bucket).grad;
  const plan::Range row = space(bucket).row_in(grad, bucket.plan);
  if (!bucket.way->gives_row() || grad.on_device() ||
      store_.storage()->resting(grad.plane, row) == storage::Medium::kDevice)
    return false;
  if (!bucket.row_holds) {
    const storage::Lease lease =
        store_.storage()->acquire(grad.plane, row, storage::Access::kWrite, storage::Medium::kDevice);
    device_.copy(lease.data(), beside(lease.data(), bucket.received), after(bucket));
    bucket.received = at::Tensor();
    return true;
  }
  if (bucket.received.device() != store_.device()) return false;  // it waits there
  const at::Tensor waits =
      storage::as_tensor(store_.storage()->scratch(row.numel(), bucket.received.scalar_type(), storage::Medium::kHost));
  waits.copy_(bucket.received);
  bucket.received = waits;
  return false;
}

void BucketReduction::complete(GradBucket& bucket, bool any) {
  if (bucket.way->at_end()) {
    if (any) bucket.way->reduce_at_end(bucket, after(bucket));
  } else {
    if (bucket.state() == BucketState::kLaunched) collect(bucket);
    if (bucket.state() == BucketState::kReceived) {
      bucket.way->finish(bucket);
      add_to_row(bucket, bucket.received, bucket.row_holds && !bucket.in_place);
      bucket.received = bucket.wire = at::Tensor();
    }
  }
  bucket.enter(BucketState::kReduced);
  bucket.row_holds = true;
}

void BucketReduction::add_late(const GradBucket& bucket, GradSlots& slots, const std::vector<at::Tensor>& late) {
  const auto options = at::TensorOptions().device(store_.device()).dtype(space(bucket).grad.dtype);
  const at::Tensor round = at::zeros({bucket.numel}, options);
  for (int32_t param : bucket.params)
    if (late[param].defined()) slots.put(param, round, bucket.begin, late[param], 1.0f, false);
  slots.settle();
  add_to_row(bucket, bucket.way->sum_now(bucket, round), true);
}

}  // namespace ds::zero

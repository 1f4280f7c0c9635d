// Brings the sum of one bucket to its owners: slots are scaled, sent, summed over the ranks, and this rank's row of the
// sum becomes, or is added to, its reduced gradients. See [Note: one reduction] in grad_reducer.h.
#pragma once
#include <vector>

#include "zero/device_context.h"
#include "zero/gradients/grad_bucket.h"
#include "zero/gradients/grad_slots.h"
#include "zero/gradients/reducer_options.h"
#include "zero/gradients/ways/reduce_way.h"
#include "zero/gradients/wire_buffers.h"

namespace ds::zero {

class BucketReduction {
 public:
  // `options` may change between two backwards.
  BucketReduction(ParamStore& store, DeviceContext& device, const ReducerOptions& options)
      : store_(store),
        device_(device),
        options_(options),
        alone_(store.everyone().alone()),
        memory_(*store.storage()) {}

  // Gives the bucket the way in which it is added up over the ranks. Once, before anything else.
  void choose_way(GradBucket& bucket) {
    bucket.way = way_of({store_, device_, options_, memory_}, bucket);
    bucket.way->prepare(bucket);
  }

  // The factors of gradients before the sum over the ranks, and of the sum after it.
  float before(const GradBucket& bucket) const { return stays(bucket) ? 1.0f : static_cast<float>(options_.predivide); }
  float after(const GradBucket& bucket) const { return stays(bucket) ? 1.0f : static_cast<float>(options_.postscale); }
  // In place: what another reduction multiplies an earlier sum by. 1 where it is the mean over the space's ranks.
  double again(const GradBucket& bucket) const {
    if (stays(bucket)) return 1.0;
    return static_cast<double>(before(bucket)) * after(bucket) * ranks(bucket).replicas->size();
  }
  // One rank, in place: the bucket is its own sum as it is filled, and nothing here is called for it.
  bool summed(const GradBucket& bucket) const { return alone(bucket) && bucket.in_place; }

  // This rank's part of the reduced gradients, where they rest on the device.
  at::Tensor row(const GradBucket& bucket) const;
  void zero_row(const GradBucket& bucket);  // wherever they rest
  at::Tensor copy_of_row(const GradBucket& bucket) const;
  void put_row(const GradBucket& bucket, const at::Tensor& values);
  // Memory for local gradients. `slots` clears its padding.
  void need_slots(GradBucket& bucket, GradSlots& slots);
  // Whether a reduction reads the slots before the backward has ended.
  bool reads_slots(const GradBucket& bucket) const {
    return bucket.way->sends() || options_.comm_dtype || before(bucket) != 1.0f || !space(bucket).grad.on_device();
  }
  // The three steps of a reduction, from kLaunched to kReduced. `any`: whether a rank has a gradient of a bucket that
  // travels in the last one (ReduceWay::at_end).
  void start(GradBucket& bucket);
  void collect(GradBucket& bucket);  // waits; what was sent is free again where it lies elsewhere
  void send_again(GradBucket& bucket) {  // the second exchange of a way that has one, once it has been collected
    if (!bucket.way->sends_again()) return;
    if (bucket.state() == BucketState::kLaunched) collect(bucket);
    if (bucket.state() == BucketState::kReceived) bucket.way->send_again(bucket);
  }
  void complete(GradBucket& bucket, bool any);
  // Adds what came too late: gradients (of each parameter, undefined: none) that this rank has for the bucket. Every
  // rank of its space calls it.
  void add_late(const GradBucket& bucket, GradSlots& slots, const std::vector<at::Tensor>& late);

  WireBuffers& memory() { return memory_; }
  const WireBuffers& memory() const { return memory_; }

 private:
  const ParamSpace& space(const GradBucket& bucket) const { return store_.spaces()[bucket.space]; }
  const SpaceRanks& ranks(const GradBucket& bucket) const { return space(bucket).ranks(); }
  // Neither this bucket nor the dense parameters have other ranks: nothing is divided.
  bool alone(const GradBucket& bucket) const { return alone_ && ranks(bucket).alone(); }
  bool stays(const GradBucket& bucket) const { return options_.local || alone(bucket); }
  void add_to_row(const GradBucket& bucket, const at::Tensor& values, bool add);
  at::Tensor beside(const at::Tensor& target, const at::Tensor& values);
  bool leave_device(GradBucket& bucket);
  storage::Lease lease_row(const GradBucket& bucket, storage::Access access) const;

  ParamStore& store_;
  DeviceContext& device_;
  const ReducerOptions& options_;
  const bool alone_;  // the dense parameters have no other rank
  WireBuffers memory_;
};

}  // namespace ds::zero

// The ways in which a bucket of gradients is added up over the ranks of its space.
//
// Adding a way is adding a file with a ReduceWayRegistration. A bucket has the first registered way, by `order`, that
// takes it; a space rule may name another one (plan::SpaceAxes::way). Each bucket has an object of its own, which may
// keep memory, and may do its part around another way, the next one that takes the bucket.
//
// [Note: one reduction in steps]
// start() sends. receive() is called when the collective has ended, perhaps while the backward still runs: this rank
// has its row of the sum then, unless finish() adds to it, which is called at the end of the backward, on all ranks in
// the same order. Nothing that a way does before finish() may change reduced gradients of earlier backwards, since a
// backward that raises leaves them as they were.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "zero/device_context.h"
#include "zero/gradients/grad_bucket.h"
#include "zero/gradients/reducer_options.h"
#include "zero/gradients/wire_buffers.h"

namespace ds::zero {

// The objects that a way works with. They outlive it.
struct WayParts {
  ParamStore& store;
  DeviceContext& device;
  const ReducerOptions& options;
  WireBuffers& memory;

  const ParamSpace& space(const BucketFacts& bucket) const { return store.spaces()[bucket.space]; }
  const SpaceRanks& ranks(const BucketFacts& bucket) const { return space(bucket).ranks(); }
};

class ReduceWay {
 public:
  virtual ~ReduceWay() = default;

  // Called once, before all other calls and on all ranks in one order: the way may open communicators.
  virtual void prepare(const BucketFacts& bucket) {}
  // Starts to send `sent`, the slots of the bucket or their copy (`wire`), and sets `work`. Both may be read until
  // receive(), which lets go of them where the result lies elsewhere.
  virtual void start(GradBucket& bucket, at::Tensor sent) = 0;
  // The work has ended. Sets `received`, this rank's row.
  virtual void receive(GradBucket& bucket) = 0;
  virtual void finish(GradBucket& bucket) {}
  // Whether there is a second exchange. Then send_again() starts it: at the end of the backward, for all buckets before
  // the first finish(), and on all ranks in the same order.
  virtual bool sends_again() const { return false; }
  virtual void send_again(GradBucket& bucket) {}
  // Whether start() reads what it gets; else that is read when the backward has ended.
  virtual bool sends() const { return true; }
  // Whether `received` lies beside the slots, and is the whole sum before finish().
  virtual bool gives_row() const { return true; }
  // Whether the bucket travels when the backward has ended on all ranks. Then reduce_at_end() does all of it: the
  // gradient in the slots becomes the sum times `factor`. It is called where any rank has a gradient of the bucket.
  virtual bool at_end() const { return false; }
  virtual void reduce_at_end(GradBucket& bucket, float factor) {}
  // Drops what the way has kept of earlier reductions: the weights are those of a checkpoint.
  virtual void forget() {}
  // Returns this rank's row of the sum of `values`, which have the layout of the slots and may be overwritten. Waits.
  virtual at::Tensor sum_now(const GradBucket& bucket, const at::Tensor& values) = 0;
};
using ReduceWayPtr = std::shared_ptr<ReduceWay>;

struct ReduceWayRow {
  std::string name;
  int order;  // lower ones are asked first
  bool (*takes)(const WayParts& parts, const BucketFacts& bucket);
  // `inner`: makes the next way that takes the bucket.
  ReduceWayPtr (*make)(const WayParts& parts, const std::function<ReduceWayPtr()>& inner);
};

struct ReduceWayRegistration {
  explicit ReduceWayRegistration(ReduceWayRow row);
};

// Memory for this rank's row of the sum of what is `sent`: the row of reduced gradients itself where it can take it.
at::Tensor row_to_receive(const WayParts& parts, const GradBucket& bucket, const at::Tensor& sent);
// ReduceWay::sum_now() by a reduce-scatter.
at::Tensor scattered_sum(const WayParts& parts, const BucketFacts& bucket, const at::Tensor& values);

// Makes the way of a bucket. Fails with the names that there are where the rule of its space names an unknown one.
ReduceWayPtr way_of(const WayParts& parts, const BucketFacts& bucket);

}  // namespace ds::zero

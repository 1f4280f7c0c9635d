// Sharded gradients: each rank gets its row of the sum by a reduce-scatter. Where zero_optimization.reduce_scatter is
// false, all ranks get the whole sum by an all-reduce, and keep their row.
#include <ATen/Functions.h>

#include "zero/gradients/ways/reduce_way.h"

namespace ds::zero {

namespace {

int64_t row_numel(const BucketFacts& bucket) { return bucket.plan.shard_end - bucket.plan.shard_begin; }

class Scatter : public ReduceWay {
 public:
  explicit Scatter(const WayParts& parts) : parts_(parts) {}

  void start(GradBucket& bucket, at::Tensor sent) override {
    const ParamSpace& space = parts_.space(bucket);
    const Buffer& grad = space.grad;
    const bool direct = grad.dtype == sent.scalar_type() || grad.dtype == at::kFloat;
    const at::ScalarType type = direct ? grad.dtype : sent.scalar_type();
    const bool here = sent.device() == parts_.store.device();
    if (here && direct && !bucket.row_holds && grad.data.defined()) {
      bucket.received =
          grad.data.narrow(0, space.offset_in(grad, bucket.plan, bucket.plan.shard_begin), row_numel(bucket));
    } else {
      bucket.received = here ? parts_.memory.borrow(row_numel(bucket), type)
                             : at::empty({row_numel(bucket)}, sent.options().dtype(type));
    }
    bucket.work = parts_.ranks(bucket).shard->reduce_scatter(sent, bucket.received, bucket.name);
  }
  void receive(GradBucket& bucket) override { bucket.wire = bucket.slots = at::Tensor(); }
  at::Tensor sum_now(const GradBucket& bucket, const at::Tensor& values) override {
    const at::Tensor row = at::empty({row_numel(bucket)}, values.options());
    parts_.ranks(bucket).shard->reduce_scatter(values, row, bucket.name)->wait();
    return row;
  }

 protected:
  const WayParts parts_;
};

class Whole : public Scatter {
 public:
  using Scatter::Scatter;

  void start(GradBucket& bucket, at::Tensor sent) override {
    bucket.work = parts_.ranks(bucket).shard->all_reduce(sent, comm::ReduceOp::kSum, bucket.name);
  }
  void receive(GradBucket& bucket) override {
    const at::Tensor& sum = bucket.wire.defined() ? bucket.wire : bucket.slots;
    bucket.received = parts_.memory.borrow(row_numel(bucket), sum.scalar_type());
    const int64_t begin = parts_.space(bucket).rank() * row_numel(bucket);
    bucket.received.copy_(sum.narrow(0, begin, row_numel(bucket)));
    bucket.wire = bucket.slots = at::Tensor();
  }
};

template <typename Way>
ReduceWayPtr made(const WayParts& parts, const std::function<ReduceWayPtr()>&) {
  return std::make_shared<Way>(parts);
}

const ReduceWayRegistration scatter_registration({"scatter", 40,
                                                  [](const WayParts& parts, const BucketFacts& bucket) {
                                                    return !bucket.in_place && parts.options.scatter;
                                                  },
                                                  &made<Scatter>});
const ReduceWayRegistration whole_registration({"whole", 50,
                                                [](const WayParts& parts, const BucketFacts& bucket) {
                                                  return !bucket.in_place && !parts.options.scatter;
                                                },
                                                &made<Whole>});

}  // namespace

}  // namespace ds::zero

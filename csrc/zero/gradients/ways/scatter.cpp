// Sharded gradients: each rank gets its row of the sum by a reduce-scatter. Where zero_optimization.reduce_scatter is
// false, all ranks get the whole sum by an all-reduce, and keep their row.
#include "zero/gradients/ways/reduce_way.h"

namespace ds::zero {

namespace {

class Scatter : public ReduceWay {
 public:
  explicit Scatter(const WayParts& parts) : parts_(parts) {}

  void start(GradBucket& bucket, at::Tensor sent) override {
    bucket.received = row_to_receive(parts_, bucket, sent);
    bucket.work = parts_.ranks(bucket).shard->reduce_scatter(sent, bucket.received, bucket.name);
  }
  void receive(GradBucket& bucket) override { bucket.wire = bucket.slots = at::Tensor(); }
  at::Tensor sum_now(const GradBucket& bucket, const at::Tensor& values) override {
    return scattered_sum(parts_, bucket, values);
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
    bucket.received = parts_.memory.borrow(bucket.row_numel(), sum.scalar_type());
    const int64_t begin = parts_.space(bucket).rank() * bucket.row_numel();
    bucket.received.copy_(sum.narrow(0, begin, bucket.row_numel()));
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

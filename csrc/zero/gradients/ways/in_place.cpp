// Every rank has whole gradients: stage 0, and experts at stage 0. The bucket is the row, and is summed where it lies.
#include "zero/gradients/ways/reduce_way.h"

namespace ds::zero {

namespace {

class InPlace : public ReduceWay {
 public:
  explicit InPlace(const WayParts& parts) : parts_(parts) {}

  void start(GradBucket& bucket, at::Tensor sent) override {
    const comm::CommunicatorPtr& ranks = parts_.ranks(bucket).replicas;
    if (ranks->size() > 1) bucket.work = ranks->all_reduce(sent, comm::ReduceOp::kSum, bucket.name);
    bucket.received = std::move(sent);
  }
  void receive(GradBucket& bucket) override { bucket.wire = at::Tensor(); }
  bool gives_row() const override { return false; }
  at::Tensor sum_now(const GradBucket& bucket, const at::Tensor& values) override {
    const comm::CommunicatorPtr& ranks = parts_.ranks(bucket).replicas;
    if (ranks->size() > 1) ranks->all_reduce(values, comm::ReduceOp::kSum, bucket.name)->wait();
    return values;
  }

 private:
  const WayParts parts_;
};

const ReduceWayRegistration in_place_registration(
    {"in place", 10, [](const WayParts&, const BucketFacts& bucket) { return bucket.in_place; },
     [](const WayParts& parts, const std::function<ReduceWayPtr()>&) -> ReduceWayPtr {
       return std::make_shared<InPlace>(parts);
     }});

}  // namespace

}  // namespace ds::zero

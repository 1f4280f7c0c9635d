// Sharded gradients of a device that the ranks' communicator does not reach: they travel through the host. Neither what
// is sent nor what arrives is on the device meanwhile. Many buckets may be on their way at one time, because backward
// may not wait for them at stage 3.
#include "zero/gradients/ways/reduce_way.h"

namespace ds::zero {

namespace {

class ByHost : public ReduceWay {
 public:
  explicit ByHost(ReduceWayPtr inner) : inner_(std::move(inner)) {}

  void prepare(const BucketFacts& bucket) override { inner_->prepare(bucket); }
  void start(GradBucket& bucket, at::Tensor sent) override {
    bucket.wire = sent.to(at::kCPU);
    bucket.slots = at::Tensor();
    inner_->start(bucket, bucket.wire);
  }
  void receive(GradBucket& bucket) override { inner_->receive(bucket); }
  void finish(GradBucket& bucket) override { inner_->finish(bucket); }
  bool gives_row() const override { return inner_->gives_row(); }
  bool sends_again() const override { return inner_->sends_again(); }
  void send_again(GradBucket& bucket) override { inner_->send_again(bucket); }
  void forget() override { inner_->forget(); }
  at::Tensor sum_now(const GradBucket& bucket, const at::Tensor& values) override {
    return inner_->sum_now(bucket, values);
  }

 private:
  const ReduceWayPtr inner_;
};

const ReduceWayRegistration by_host_registration({"by host", 20,
                                                  [](const WayParts& parts, const BucketFacts& bucket) {
                                                    return bucket.eager &&
                                                           !parts.ranks(bucket).shard->reaches(parts.store.device());
                                                  },
                                                  [](const WayParts&, const std::function<ReduceWayPtr()>& inner)
                                                      -> ReduceWayPtr { return std::make_shared<ByHost>(inner()); }});

}  // namespace

}  // namespace ds::zero

// Gradients that no other rank has a part of: this rank's sum is what its backward has left.
#include <utility>

#include "zero/gradients/ways/reduce_way.h"

namespace ds::zero {

namespace {

class Own : public ReduceWay {
 public:
  void start(GradBucket& bucket, at::Tensor sent) override {
    bucket.received = std::move(sent);
    bucket.work = std::make_shared<comm::DoneWork>();
  }
  bool sends() const override { return false; }
  void receive(GradBucket& bucket) override { bucket.wire = bucket.slots = at::Tensor(); }
  at::Tensor sum_now(const GradBucket&, const at::Tensor& values) override { return values; }
};

const ReduceWayRegistration own_registration(
    {"own", 15,
     [](const WayParts& parts, const BucketFacts& bucket) { return !bucket.in_place && parts.ranks(bucket).alone(); },
     [](const WayParts&, const std::function<ReduceWayPtr()>&) -> ReduceWayPtr { return std::make_shared<Own>(); }});

}  // namespace

}  // namespace ds::zero

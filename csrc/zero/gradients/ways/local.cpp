// Gradients that stay with their rank where the optimizer exchanges something else (ReducerOptions::local), else
// another way.
#include <utility>

#include "zero/gradients/ways/reduce_way.h"

namespace ds::zero {

namespace {

class Local : public ReduceWay {
 public:
  Local(const WayParts& parts, ReduceWayPtr inner) : parts_(parts), inner_(std::move(inner)) {}

  void start(GradBucket& bucket, at::Tensor sent) override {
    if (!stays()) return inner_->start(bucket, std::move(sent));
    bucket.received = std::move(sent);
  }
  void receive(GradBucket& bucket) override { stays() ? void() : inner_->receive(bucket); }
  void finish(GradBucket& bucket) override { stays() ? void() : inner_->finish(bucket); }
  bool sends() const override { return !stays() && inner_->sends(); }
  bool gives_row() const override { return !stays() && inner_->gives_row(); }
  bool at_end() const override { return !stays() && inner_->at_end(); }
  void reduce_at_end(GradBucket& bucket, float factor) override { inner_->reduce_at_end(bucket, factor); }
  at::Tensor sum_now(const GradBucket& bucket, const at::Tensor& values) override {
    return stays() ? values : inner_->sum_now(bucket, values);
  }

 private:
  bool stays() const { return parts_.options.local; }

  const WayParts parts_;
  const ReduceWayPtr inner_;
};

// Around all other ways of whole gradients.
const ReduceWayRegistration local_registration(
    {"local", -1, [](const WayParts&, const BucketFacts& bucket) { return bucket.in_place; },
     [](const WayParts& parts, const std::function<ReduceWayPtr()>& inner) -> ReduceWayPtr {
       return std::make_shared<Local>(parts, inner());
     }});

}  // namespace

}  // namespace ds::zero

// Sharded gradients of which other ranks hold the same shard (MiCS): the row is added up over these, too.
#include "zero/gradients/ways/reduce_way.h"

namespace ds::zero {

namespace {

class Replicas : public ReduceWay {
 public:
  Replicas(const WayParts& parts, ReduceWayPtr inner) : parts_(parts), inner_(std::move(inner)) {}

  void prepare(const BucketFacts& bucket) override { inner_->prepare(bucket); }
  void start(GradBucket& bucket, at::Tensor sent) override { inner_->start(bucket, std::move(sent)); }
  void receive(GradBucket& bucket) override { inner_->receive(bucket); }
  void finish(GradBucket& bucket) override {
    inner_->finish(bucket);
    add_up(bucket, bucket.received);
  }
  bool sends_again() const override { return inner_->sends_again(); }
  void send_again(GradBucket& bucket) override { inner_->send_again(bucket); }
  void forget() override { inner_->forget(); }
  bool gives_row() const override { return false; }
  at::Tensor sum_now(const GradBucket& bucket, const at::Tensor& values) override {
    const at::Tensor row = inner_->sum_now(bucket, values);
    add_up(bucket, row);
    return row;
  }

 private:
  void add_up(const GradBucket& bucket, const at::Tensor& row) const {
    parts_.ranks(bucket).replicas->all_reduce(row, comm::ReduceOp::kSum, bucket.name)->wait();
  }

  const WayParts parts_;
  const ReduceWayPtr inner_;
};

const ReduceWayRegistration replicas_registration({"replicas", 30,
                                                   [](const WayParts& parts, const BucketFacts& bucket) {
                                                     return !bucket.in_place &&
                                                            parts.ranks(bucket).replicas->size() > 1;
                                                   },
                                                   [](const WayParts& parts,
                                                      const std::function<ReduceWayPtr()>& inner) -> ReduceWayPtr {
                                                     return std::make_shared<Replicas>(parts, inner());
                                                   }});

}  // namespace

}  // namespace ds::zero

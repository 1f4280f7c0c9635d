// Whole gradients of embeddings, of which only the touched rows travel.
#include "zero/gradients/sparse_rows.h"
#include "zero/gradients/ways/reduce_way.h"

namespace ds::zero {

namespace {

class Rows : public ReduceWay {
 public:
  Rows(const WayParts& parts, ReduceWayPtr whole) : parts_(parts), whole_(std::move(whole)) {}

  void prepare(const BucketFacts& bucket) override { whole_->prepare(bucket); }
  void start(GradBucket&, at::Tensor) override {}
  void receive(GradBucket&) override {}
  bool gives_row() const override { return false; }
  bool at_end() const override { return true; }
  void reduce_at_end(GradBucket& bucket, float factor) override {
    const at::Tensor grad = parts_.store.view(static_cast<size_t>(bucket.params.front()), parts_.space(bucket).grad);
    const at::ScalarType wire = parts_.options.comm_dtype.value_or(grad.scalar_type());
    reduce_rows(*parts_.ranks(bucket).replicas, grad, factor, wire, bucket.name);
  }
  at::Tensor sum_now(const GradBucket& bucket, const at::Tensor& values) override {
    return whole_->sum_now(bucket, values);
  }

 private:
  const WayParts parts_;
  const ReduceWayPtr whole_;
};

const ReduceWayRegistration rows_registration(
    {"rows", 0, [](const WayParts&, const BucketFacts& bucket) { return bucket.by_rows; },
     [](const WayParts& parts, const std::function<ReduceWayPtr()>& inner) -> ReduceWayPtr {
       return std::make_shared<Rows>(parts, inner());
     }});

}  // namespace

}  // namespace ds::zero

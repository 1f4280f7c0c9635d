// Sharded gradients that travel as blocks of integers: 8 bits for each element inside a host, 4 between hosts
// (zero_optimization.zero_quantized_gradients, ZeRO++'s qgZ). Where there are two exchanges, the one between hosts is
// made at the end of the backward, for all buckets at once.
#include <memory>
#include <optional>
#include <utility>

#include "comm/compressed/block_reduce.h"
#include "zero/gradients/ways/reduce_way.h"

namespace ds::zero {

namespace {

class Blocks : public ReduceWay {
 public:
  explicit Blocks(const WayParts& parts) : parts_(parts) {}

  void prepare(const BucketFacts& bucket) override {
    reduce_.emplace(parts_.ranks(bucket).shard, parts_.ranks(bucket).by_host(), bucket.row_numel());
  }
  void start(GradBucket& bucket, at::Tensor sent) override {
    if (parts_.options.block_errors) prepare_errors(bucket, sent);
    bucket.received = row_to_receive(parts_, bucket, sent);
    bucket.work = reduce_->start(place_of(sent), sent, errors_, bucket.name);
  }
  void receive(GradBucket& bucket) override {
    reduce_->receive(place_of(bucket.received), bucket.received, errors_);
    bucket.wire = bucket.slots = at::Tensor();
  }
  void finish(GradBucket& bucket) override {
    if (reduce_->in_two_steps()) reduce_->finish(place_of(bucket.received), bucket.received);
  }
  bool gives_row() const override { return !reduce_->in_two_steps(); }
  bool sends_again() const override { return reduce_->in_two_steps(); }
  void send_again(GradBucket& bucket) override { reduce_->send_again(place_of(bucket.received), bucket.name); }
  // A late round is rare: it travels whole.
  at::Tensor sum_now(const GradBucket& bucket, const at::Tensor& values) override {
    return scattered_sum(parts_, bucket, values);
  }
  void forget() override { reductions_ = 0; }

 private:
  // Values that travel through the host are coded there.
  comm::BlockReduce::Place place_of(const at::Tensor& values) {
    const bool here = values.device() == parts_.store.device();
    if (!here && !host_) host_ = std::make_unique<DeviceContext>(parts_.device.threads());
    const DeviceContext& device = here ? parts_.device : *host_;
    const auto run = [&device](const comm::BlockReduce::Call& call) {
      device.run([&](const kernels::Launch& launch) { call(device.codes(), launch); });
    };
    if (here) return {run, [this](int64_t bytes) { return parts_.memory.borrow(bytes, at::kByte); }};
    return {run, [options = values.options()](int64_t bytes) { return at::empty({bytes}, options.dtype(at::kByte)); }};
  }

  // The first reduction of a step finds no reduced gradients.
  void prepare_errors(const GradBucket& bucket, const at::Tensor& sent) {
    if (!bucket.row_holds && reductions_++ % parts_.options.block_reset_steps != 0) return;
    if (bucket.row_holds && errors_.first.defined()) return;
    errors_.beta = parts_.options.block_error_beta;
    const bool here = sent.device() == parts_.store.device();
    const storage::Medium at = here ? storage::Medium::kDevice : storage::Medium::kHost;
    const auto zeros = [&](at::Tensor& error, int64_t numel) {
      if (!error.defined() && numel > 0)
        error = storage::as_tensor(parts_.store.storage()->scratch(numel, at::kFloat, at));
      if (numel > 0) error.zero_();
    };
    zeros(errors_.first, reduce_->first_numel());
    zeros(errors_.second, reduce_->second_numel());
  }

  const WayParts parts_;
  std::optional<comm::BlockReduce> reduce_;
  comm::BlockReduce::Errors errors_;
  int64_t reductions_ = 0;  // that were the first of their step
  std::unique_ptr<DeviceContext> host_;
};

const ReduceWayRegistration blocks_registration({"blocks", 35,
                                                 [](const WayParts& parts, const BucketFacts& bucket) {
                                                   const at::ScalarType type = parts.space(bucket).grad.dtype;
                                                   return parts.options.blocks && !bucket.in_place &&
                                                          parts.ranks(bucket).shard->size() > 1 &&
                                                          has_kernel_dtype(parts.options.comm_dtype.value_or(type));
                                                 },
                                                 [](const WayParts& parts, const std::function<ReduceWayPtr()>&)
                                                     -> ReduceWayPtr { return std::make_shared<Blocks>(parts); }});

}  // namespace

}  // namespace ds::zero

#include "comm/c10d_communicator.h"

#include <ATen/Functions.h>

#include "comm/c10d_compat.h"

namespace ds::comm {

namespace {

c10d::ReduceOp::RedOpType c10d_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kSum: break;
  }
  return c10d::ReduceOp::SUM;
}

class C10dWork : public Work {
 public:
  using Handle = decltype(std::declval<c10d::ProcessGroup>().barrier());

  // `carrier` is what travelled; copied into `target` on completion where they differ.
  C10dWork(Handle handle, at::Tensor carrier, at::Tensor target)
      : handle_(std::move(handle)), carrier_(std::move(carrier)), target_(std::move(target)) {}

  void wait() override {
    if (!handle_) return;
    auto handle = std::move(handle_);
    handle_ = Handle();
    handle->wait();
    if (!carrier_.is_same(target_)) target_.copy_(carrier_);
    carrier_ = at::Tensor();
    target_ = at::Tensor();
  }

 private:
  Handle handle_;
  at::Tensor carrier_, target_;
};

class C10dCommunicator : public Communicator {
 public:
  explicit C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group)
      : group_(std::move(group)), name_(group_->getBackendName()) {}

  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }
  std::string name() const override { return name_; }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    std::vector<at::Tensor> carrier{carried(tensor)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d_op(op);
    auto handle = group_->allreduce(carrier, options);
    return std::make_shared<C10dWork>(std::move(handle), carrier[0], tensor);
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    std::vector<at::Tensor> carrier{carried(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    auto handle = group_->broadcast(carrier, options);
    return std::make_shared<C10dWork>(std::move(handle), carrier[0], tensor);
  }

  void barrier() override { group_->barrier()->wait(); }

 private:
  at::Tensor carried(const at::Tensor& tensor) const {
    if (tensor.device().is_cpu()) {
      if (tensor.scalar_type() == at::kBool) return tensor.to(at::kByte);
      if (tensor.scalar_type() == at::kBFloat16 && !compat::gloo_carries_bf16()) return tensor.to(at::kFloat);
    }
    return tensor;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string name_;
};

}  // namespace

CommunicatorPtr c10d_communicator(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return std::make_shared<C10dCommunicator>(std::move(group));
}

}  // namespace ds::comm

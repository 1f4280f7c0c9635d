#include "comm/transports/c10d_communicator.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <functional>

#include "base/error.h"
#include "base/process.h"
#include "comm/c10d_compat.h"
#include "comm/process_peer_memory.h"

namespace ds::comm {

namespace {

c10d::ReduceOp::RedOpType c10d_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg: return c10d::ReduceOp::AVG;
    case ReduceOp::kProduct: return c10d::ReduceOp::PRODUCT;
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
    case ReduceOp::kAnd: return c10d::ReduceOp::BAND;
    case ReduceOp::kOr: return c10d::ReduceOp::BOR;
    case ReduceOp::kXor: return c10d::ReduceOp::BXOR;
  }
  fail(ErrorKind::kValue, "there is no reduction number ", static_cast<int>(op));
}

bool arithmetic(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kProduct || op == ReduceOp::kMin || op == ReduceOp::kMax;
}

// What Debian's gloo (torch 1.13) and that of 2.x both reduce; bf16 and bool travel as something wider.
bool gloo_reduces(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kBool:
    case at::kInt:
    case at::kLong: return true;
    default: return false;
  }
}

using Handle = decltype(std::declval<c10d::ProcessGroup>().barrier());

// Waits for some operations of c10d, then does what is left to do on this rank.
class C10dWork : public Work {
 public:
  C10dWork(std::vector<Handle> handles, std::function<void()> finish)
      : handles_(std::move(handles)), finish_(std::move(finish)) {}

  bool ready() override {
    for (const Handle& handle : handles_)
      if (!handle->isCompleted()) return false;
    return true;
  }

  void wait() override {
    const auto handles = std::move(handles_);
    const auto finish = std::move(finish_);
    handles_.clear();
    finish_ = nullptr;
    for (const Handle& handle : handles) handle->wait();
    if (finish) finish();
  }

 private:
  std::vector<Handle> handles_;
  std::function<void()> finish_;
};

class C10dCommunicator : public Communicator {
 public:
  C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, BlockingRegion blocking_region)
      : blocking_region_(std::move(blocking_region)),
        group_(std::move(group)),
        name_(group_->getBackendName()),
        rank_(group_->getRank()),
        size_(group_->getSize()),
        gloo_(name_.find("gloo") != std::string::npos) {}
  // Of some ranks of the group, which then send to each other directly.
  C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, BlockingRegion blocking_region,
                   std::vector<int> members)
      : C10dCommunicator(std::move(group), std::move(blocking_region)) {
    rank_ = static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
    size_ = static_cast<int>(members.size());
    members_ = std::move(members);
    first_tag_ += 1 << 26;
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return name_; }
  bool carries(const Op& op) const override {
    if (op.verb == Verb::kBarrier) return members_.empty();
    if (native(op.own())) return op.verb != Verb::kGather && op.verb != Verb::kScatter && natively(op);
    if (op.verb == Verb::kSend || op.verb == Verb::kRecv) return op.own().device().is_cpu();
    if (!members_.empty()) return false;
    return op.verb == Verb::kBroadcast ||
           (op.verb == Verb::kAllReduce && arithmetic(op.reduce) && gloo_reduces(op.out.scalar_type()));
  }
  WorkPtr run_all(const std::vector<Op>& ops) override { return transfers(ops, first_tag_); }
  CommunicatorPtr among(const std::vector<int>& ranks) override {
    return std::make_shared<C10dCommunicator>(group(), blocking_region_, ranks);
  }
  PeerMemoryPtr peer_memory(int64_t bytes) override { return process_peer_memory(*this, bytes); }
  // The group may end here, and gloo's end waits for its threads.
  ~C10dCommunicator() override { leave(); }
  void leave() override {
    if (!group_) return;
    if (!owner_.here()) return static_cast<void>(group_.release());  // its end would wait for threads of the parent
    blocking_region_ ? blocking_region_([this] { group_.reset(); }) : group_.reset();
  }

 protected:
  bool pairwise() const override { return true; }
  bool reaches(const c10::Device& device) const override { return device.is_cpu() || (members_.empty() && !gloo_); }
  WorkPtr exchange(const std::vector<Op>& ops) override {
    return transfers(ops, first_tag_ + 1 + (sequence_++ & 0xffffff));
  }

  WorkPtr start(const Op& op) override {
    if (op.verb == Verb::kBarrier) return joined(group()->barrier());
    if (op.verb == Verb::kSend || op.verb == Verb::kRecv) return transfers({op}, first_tag_);
    if (op.own().numel() == 0 && op.verb != Verb::kAllToAll) return std::make_shared<DoneWork>();
    if (op.verb == Verb::kAllReduce || op.verb == Verb::kBroadcast || op.verb == Verb::kReduce) return in_place(op);
    at::Tensor in = op.in, out = op.out;
    if (op.verb == Verb::kAllGather) return joined(group()->_allgather_base(out, in));
    if (op.verb == Verb::kAllToAll) {
      auto take = op.out_counts, give = op.in_counts;
      in = in.view({-1});
      out = out.view({-1});
      return joined(group()->alltoall_base(out, in, take, give));
    }
    if (out.scalar_type() != in.scalar_type()) out = at::empty_like(out, in.options());
    c10d::ReduceScatterOptions options;
    options.reduceOp = c10d_op(op.reduce);
    return joined(group()->_reduce_scatter_base(out, in, options), out, op.out);
  }

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const {
    if (!group_)
      fail(
          ErrorKind::kRuntime,
          "this process has left its process group, as it does when it ends, or when nobody holds the engine any more");
    return group_;
  }

  // On a device that the backend serves itself. gloo has no reduce-scatter or all-gather of one tensor on torch 1.13,
  // and slow ones on 2.11 (1.5 to 2 times an all-reduce). Sending each rank its row directly moves the least data,
  // overlaps all peers, needs no arithmetic of the backend, so that every dtype works, and leaves the order of the sum
  // to us.
  bool native(const at::Tensor& tensor) const { return members_.empty() && !tensor.device().is_cpu() && !gloo_; }
  bool natively(const Op& op) const {
    if (op.verb == Verb::kReduceScatter || op.verb == Verb::kAllReduce || op.verb == Verb::kReduce)
      return op.in_counts.empty() && (arithmetic(op.reduce) || (op.reduce == ReduceOp::kAvg && name_ == "nccl"));
    return op.verb == Verb::kAllToAll || op.out_counts.empty();
  }

  int peer(int r) const { return members_.empty() ? r : members_[r]; }

  WorkPtr in_place(const Op& op) {
    std::vector<at::Tensor> wire{wire_tensor(op.out)};
    if (op.verb == Verb::kAllReduce) {
      c10d::AllreduceOptions options;
      options.reduceOp = c10d_op(op.reduce);
      return joined(group()->allreduce(wire, options), wire[0], op.out);
    }
    if (op.verb == Verb::kBroadcast) {
      c10d::BroadcastOptions options;
      options.rootRank = op.peer;
      return joined(group()->broadcast(wire, options), wire[0], op.out);
    }
    c10d::ReduceOptions options;
    options.reduceOp = c10d_op(op.reduce);
    options.rootRank = op.peer;
    return joined(group()->reduce(wire, options), wire[0], op.out);
  }

  // Elsewhere than in host memory a transfer may wait for its other half: of each pair the lower rank sends first.
  WorkPtr transfers(const std::vector<Op>& ops, int tag) {
    std::vector<Handle> handles;
    const auto issue = [&](const Op& op) {
      std::vector<at::Tensor> moved{op.own()};
      if (moved[0].numel() == 0) return;
      handles.push_back(op.verb == Verb::kSend ? group()->send(moved, peer(op.peer), tag)
                                               : group()->recv(moved, peer(op.peer), tag));
    };
    const auto first = [&](const Op& op) {
      return op.own().device().is_cpu() || (op.verb == Verb::kSend) == (rank_ < op.peer);
    };
    for (const Op& op : ops)
      if (first(op)) issue(op);
    for (const Op& op : ops)
      if (!first(op)) issue(op);
    return std::make_shared<C10dWork>(std::move(handles), nullptr);
  }

  static WorkPtr joined(Handle handle) {
    return std::make_shared<C10dWork>(std::vector<Handle>{std::move(handle)}, nullptr);
  }
  static WorkPtr joined(Handle handle, const at::Tensor& wire, const at::Tensor& target) {
    std::function<void()> finish;
    if (!wire.is_same(target)) finish = [=] { target.copy_(wire); };
    return std::make_shared<C10dWork>(std::vector<Handle>{std::move(handle)}, std::move(finish));
  }

  at::Tensor wire_tensor(const at::Tensor& tensor) const {
    if (tensor.device().is_cpu()) {
      if (tensor.scalar_type() == at::kBool) return tensor.to(at::kByte);
      if (tensor.scalar_type() == at::kBFloat16 && !compat::gloo_carries_bf16()) return tensor.to(at::kFloat);
    }
    return tensor;
  }

  int first_tag_ = 1 << 28;   // above what scripts use for messages of their own
  std::vector<int> members_;  // ranks of the group; empty: all
  BlockingRegion blocking_region_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const OwningProcess owner_;
  std::string name_;
  int rank_, size_;
  const bool gloo_;
  int sequence_ = 0;
};

}  // namespace

CommunicatorPtr c10d_communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, BlockingRegion blocking_region) {
  return std::make_shared<C10dCommunicator>(std::move(group), std::move(blocking_region));
}

}  // namespace ds::comm

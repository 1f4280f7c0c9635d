#include "comm/transports/c10d_communicator.h"

#include <ATen/Functions.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>

#include "base/blocking_region.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/process.h"
#include "base/ranges.h"
#include "comm/c10d_compat.h"
#include "comm/calls/one_queue.h"
#include "comm/shared_memory/process_peer_memory.h"

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

// Types that both Debian's gloo (torch 1.13) and that of torch 2.x know. bf16 and bool are sent as wider types.
bool gloo_carries(at::ScalarType type) {
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

// The host waits this long for an operation of gloo before it checks whether the group was aborted.
constexpr milliseconds kSlice(500);

class C10dWork;

// The state of the end of a communicator, shared with its works.
struct Ending {
  std::atomic<bool> asked{false};
  std::mutex mutex;  // of what follows
  std::string why;
  std::vector<std::weak_ptr<C10dWork>> under_way;

  [[noreturn]] void refuse() {
    std::lock_guard lock(mutex);
    fail(ErrorKind::kRuntime, "the group has been aborted: ", why);
  }
};
using EndingPtr = std::shared_ptr<Ending>;

// Waits for some operations of c10d, then does what is left to do on this rank. Waits for gloo end, too, when the
// communicator is aborted: those for transfers can be ended from outside, all others come back every half second.
class C10dWork : public Work {
 public:
  enum class Kind { kDevice, kCollectives, kTransfers };
  C10dWork(Kind kind, std::vector<Handle> handles, std::function<void()> finish, EndingPtr ending)
      : kind_(kind), handles_(std::move(handles)), finish_(std::move(finish)), ending_(std::move(ending)) {}

  bool ready() override {
    std::lock_guard lock(mutex_);
    for (const Handle& handle : handles_)
      if (!handle->isCompleted()) return false;
    return true;
  }

  void wait() override {
    const auto finish = std::exchange(finish_, nullptr);
    std::vector<Handle> handles;
    {
      std::lock_guard lock(mutex_);
      handles = handles_;
    }
    const auto forget = [this] {
      std::lock_guard lock(mutex_);
      handles_.clear();
    };
    try {
      for (const Handle& handle : handles) wait_for(handle);
    } catch (...) {
      forget();
      throw;
    }
    forget();
    if (finish) finish();
  }

  void abort() noexcept {
    if (kind_ != Kind::kTransfers) return;
    std::lock_guard lock(mutex_);
    for (const Handle& handle : handles_) {
      try {
        handle->abort();
      } catch (const std::exception&) {  // it has ended by itself
        continue;
      }
    }
  }

 private:
  void wait_for(const Handle& handle) {
    if (kind_ == Kind::kDevice) return static_cast<void>(handle->wait());
    if (kind_ == Kind::kTransfers) {
      if (!handle->wait()) ending_->refuse();
      return;
    }
    for (;;) {
      try {
        handle->wait(kSlice);
        return;
      } catch (const std::exception& error) {
        if (std::string(error.what()).find("Operation timed out!") == std::string::npos) throw;
      }
      if (handle->isCompleted()) return static_cast<void>(handle->wait());
      if (ending_->asked) ending_->refuse();
    }
  }

  const Kind kind_;
  std::mutex mutex_;  // of handles_
  std::vector<Handle> handles_;
  std::function<void()> finish_;
  EndingPtr ending_;
};

at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

class C10dCommunicator : public Communicator, public OneQueue {
 public:
  C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, GlooBy gloo_by)
      : gloo_by_(gloo_by),
        group_(std::move(group)),
        name_(group_->getBackendName()),
        rank_(group_->getRank()),
        size_(group_->getSize()),
        gloo_(gloo_by != GlooBy::kNothing && (compat::is_gloo(group_) || gloo_by == GlooBy::kCollectives)) {}
  // A communicator of some ranks of the group, which then send to each other directly.
  C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<int> members)
      : C10dCommunicator(std::move(group), GlooBy::kTransfers) {
    rank_ = static_cast<int>(index_of(members, rank_));
    size_ = static_cast<int>(members.size());
    members_ = std::move(members);
    first_tag_ += 1 << 26;
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return name_; }
  // NCCL and its kin: torch gives two ranks one stream for both directions.
  bool has_one_queue() const override { return name_.find("ccl") != std::string::npos; }
  bool carries(const Op& op) const override {
    if (op.verb == Verb::kBarrier) return members_.empty();
    if (native(op.own())) return natively(op);
    if (!reaches(op.own().device())) return false;  // through the host: gloo takes no device but CUDA
    if (is_message(op.verb)) return true;
    if (!members_.empty()) return false;
    if (by_collectives(op.own())) return carries_by_collectives(op);
    if (!gloo_carries(op.own().scalar_type())) return false;
    return op.verb == Verb::kBroadcast || (op.verb == Verb::kAllReduce && arithmetic(op.reduce));
  }
  bool reaches(const c10::Device& device) const override { return device.is_cpu() || (members_.empty() && !gloo_); }
  bool carries_host_memory() const override { return gloo_ || name_.find("mpi") != std::string::npos; }
  WorkPtr run_all(const std::vector<Op>& ops) override { return transfers(ops, first_tag_); }
  CommunicatorPtr among(const std::vector<int>& ranks) override {
    return std::make_shared<C10dCommunicator>(group(), ranks);
  }
  PeerMemoryPtr peer_memory(int64_t bytes) override { return process_peer_memory(*this, bytes); }
  void abort(const std::string& why) noexcept override {
    std::vector<std::weak_ptr<C10dWork>> under_way;
    {
      std::lock_guard lock(ending_->mutex);
      if (ending_->asked.exchange(true)) return;
      ending_->why = why;
      under_way.swap(ending_->under_way);
      // gloo's threads may be in an operation that never ends, and the group's end would wait for them.
      if (gloo_ && group_) (void)c10::intrusive_ptr<c10d::ProcessGroup>(group_).release();
    }
    for (const auto& each : under_way)
      if (const auto work = each.lock()) work->abort();
  }
  // The group may end here, and gloo's end waits for its threads.
  ~C10dCommunicator() override { leave(); }
  void leave() override {
    if (!group_) return;
    if (!owner_.here()) return static_cast<void>(group_.release());  // its end would wait for threads of the parent
    in_blocking_region([this] { group_.reset(); });
  }

 protected:
  bool pairwise() const override { return gloo_by_ != GlooBy::kCollectives; }
  WorkPtr exchange(const std::vector<Op>& ops) override {
    return transfers(ops, first_tag_ + 1 + (sequence_++ & 0xffffff));
  }

  WorkPtr start(const Op& op) override {
    if (op.verb == Verb::kBarrier) return joined(group()->barrier());
    if (is_message(op.verb)) return transfers({op}, for_scripts() ? op.message_tag : first_tag_);
    if (op.own().numel() == 0 && op.verb != Verb::kAllToAll) return std::make_shared<DoneWork>();
    if (op.verb == Verb::kAllReduce || op.verb == Verb::kBroadcast || op.verb == Verb::kReduce) return in_place(op);
    at::Tensor in = op.in, out = op.out;
    const bool bytes = by_collectives(op.own());
    if (bytes) {
      in = as_bytes(in);
      out = as_bytes(out);
    }
    if (op.verb == Verb::kAllGather) {
      if (!bytes) return joined(group()->_allgather_base(out, in));
      std::vector<at::Tensor> mine{in};
      std::vector<std::vector<at::Tensor>> rows{out.view({size_, -1}).unbind(0)};
      return joined(group()->allgather(rows, mine));
    }
    if (op.verb == Verb::kAllToAll) {
      auto take = op.out_counts, give = op.in_counts;
      for (auto* counts : {&take, &give})
        for (int64_t& count : *counts) count *= bytes ? static_cast<int64_t>(op.own().element_size()) : 1;
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
    if (ending_->asked) ending_->refuse();
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
    switch (op.verb) {
      case Verb::kReduceScatter:
      case Verb::kAllReduce:
      case Verb::kReduce:
        return op.in_counts.empty() &&
               (arithmetic(op.reduce) || (op.reduce == ReduceOp::kAvg && name_.find("nccl") != std::string::npos));
      case Verb::kAllGather: return op.out_counts.empty();
      case Verb::kBroadcast:
      case Verb::kAllToAll:
      case Verb::kSend:
      case Verb::kRecv: return true;
      default: return false;
    }
  }

  // Messages of scripts have their own tags, as those that torch sends in this group; empty ones are sent, too.
  bool for_scripts() const { return gloo_by_ != GlooBy::kTransfers; }

  bool by_collectives(const at::Tensor& tensor) const {
    return gloo_by_ == GlooBy::kCollectives && gloo_ && tensor.device().is_cpu();
  }
  bool carries_by_collectives(const Op& op) const {
    const at::ScalarType type = op.own().scalar_type();
    switch (op.verb) {
      case Verb::kBroadcast:
      case Verb::kAllToAll: return true;
      case Verb::kAllGather: return op.out_counts.empty();
      case Verb::kReduce:
      case Verb::kAllReduce:
        // bf16 only where it may not take two steps: as fp32 it is twice the bytes.
        if (!gloo_carries(type) || (type == at::kBFloat16 && op.wait != Wait::kDetached)) return false;
        if (op.verb == Verb::kReduce && op.wait != Wait::kDetached) return false;
        return arithmetic(op.reduce) || (op.reduce == ReduceOp::kAvg && at::isFloatingType(type));
      default: return false;
    }
  }

  int peer(int r) const { return members_.empty() ? r : members_[r]; }

  WorkPtr in_place(const Op& op) {
    const bool mine = op.verb != Verb::kReduce || op.peer == rank_;  // whether the result is this rank's, too
    std::vector<at::Tensor> wire{op.verb == Verb::kBroadcast ? sent_tensor(op.out) : reduced_tensor(op)};
    if (!mine && wire[0].is_same(op.out)) wire[0] = op.out.clone();
    const bool average = op.verb != Verb::kBroadcast && op.reduce == ReduceOp::kAvg && gloo_;
    const c10d::ReduceOp::RedOpType reduction = c10d_op(average ? ReduceOp::kSum : op.reduce);
    std::function<void()> finish;
    if (mine && (average || !wire[0].is_same(op.out)))
      finish = [from = wire[0], to = op.out, by = average ? size_ : 1] {
        if (by > 1) at::Tensor(from).div_(by);
        if (!from.is_same(to) && from.data_ptr() != to.data_ptr()) at::Tensor(to).copy_(from);
      };
    if (op.verb == Verb::kAllReduce) {
      c10d::AllreduceOptions options;
      options.reduceOp = reduction;
      return joined(group()->allreduce(wire, options), std::move(finish));
    }
    if (op.verb == Verb::kBroadcast) {
      c10d::BroadcastOptions options;
      options.rootRank = op.peer;
      return joined(group()->broadcast(wire, options), std::move(finish));
    }
    c10d::ReduceOptions options;
    options.reduceOp = reduction;
    options.rootRank = op.peer;
    return joined(group()->reduce(wire, options), std::move(finish));
  }

  // Elsewhere than in host memory a transfer may wait for its other half: of each pair the lower rank sends first.
  WorkPtr transfers(const std::vector<Op>& ops, int tag) {
    std::vector<Handle> handles;
    std::function<void()> finish;
    const auto issue = [&](const Op& op) {
      std::vector<at::Tensor> moved{op.own()};
      if (moved[0].numel() == 0 && !for_scripts()) return;
      if (op.peer == kAnyRank) {
        handles.push_back(group()->recvAnysource(moved, tag));
        if (op.sender) finish = [handle = handles.back(), to = op.sender] { *to = handle->sourceRank(); };
        return;
      }
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
    return under_way(C10dWork::Kind::kTransfers, std::move(handles), std::move(finish));
  }

  WorkPtr joined(Handle handle, std::function<void()> finish = nullptr) {
    return under_way(gloo_ ? C10dWork::Kind::kCollectives : C10dWork::Kind::kDevice, {std::move(handle)},
                     std::move(finish));
  }
  WorkPtr joined(Handle handle, const at::Tensor& wire, const at::Tensor& target) {
    std::function<void()> finish;
    if (!wire.is_same(target)) finish = [=] { target.copy_(wire); };
    return joined(std::move(handle), std::move(finish));
  }
  WorkPtr under_way(C10dWork::Kind kind, std::vector<Handle> handles, std::function<void()> finish) {
    auto made = std::make_shared<C10dWork>(kind, std::move(handles), std::move(finish), ending_);
    if (kind != C10dWork::Kind::kTransfers) return made;
    std::lock_guard lock(ending_->mutex);
    auto& all = ending_->under_way;
    erase_if(all, [](const auto& each) { return each.expired(); });
    all.push_back(made);
    if (ending_->asked) made->abort();
    return made;
  }

  at::Tensor sent_tensor(const at::Tensor& tensor) const {
    if (by_collectives(tensor)) return as_bytes(tensor);
    return wire_tensor(tensor);
  }
  // By collectives sums of bf16 are formed in fp32, which gloo does not do.
  at::Tensor reduced_tensor(const Op& op) const {
    if (by_collectives(op.out) && op.out.scalar_type() == at::kBFloat16) return op.out.to(at::kFloat);
    if (by_collectives(op.out) && op.out.scalar_type() == at::kHalf && op.reduce == ReduceOp::kAvg)
      return op.out.to(at::kFloat);
    return wire_tensor(op.out);
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
  const GlooBy gloo_by_;
  const EndingPtr ending_ = std::make_shared<Ending>();
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const OwningProcess owner_;
  std::string name_;
  int rank_, size_;
  const bool gloo_;
  int sequence_ = 0;
};

}  // namespace

CommunicatorPtr c10d_communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, GlooBy gloo_by) {
  return std::make_shared<C10dCommunicator>(std::move(group), gloo_by);
}

}  // namespace ds::comm

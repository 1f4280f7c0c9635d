#include "comm/transports/nccl_communicator.h"

#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <utility>

#include "base/error.h"
#include "comm/calls/event_pool.h"
#include "comm/calls/one_queue.h"
#include "comm/nccl/native_stream.h"
#include "comm/nccl/nccl_tensors.h"

namespace ds::comm {

namespace {

// On truth values addition is "or" and multiplication is "and".
std::optional<nccl::RedOp> nccl_op(ReduceOp op, at::ScalarType type) {
  const bool truth = type == at::kBool;
  switch (op) {
    case ReduceOp::kSum: return truth ? nccl::kMax : nccl::kSum;
    case ReduceOp::kProduct: return truth ? nccl::kMin : nccl::kProd;
    case ReduceOp::kMin: return nccl::kMin;
    case ReduceOp::kMax: return nccl::kMax;
    case ReduceOp::kAvg: return truth ? std::nullopt : std::optional(nccl::kAvg);
    default: return std::nullopt;
  }
}

// Work of the device on another stream; wait() makes the current stream wait for it. The tensors are held until then,
// because torch's allocator reuses their memory in the order of the stream on which they were made.
class StreamWork : public Work {
 public:
  StreamWork(std::shared_ptr<EventPool> events, c10::Event done, std::vector<Op> ops, std::function<void()> finish)
      : events_(std::move(events)), done_(std::move(done)), ops_(std::move(ops)), finish_(std::move(finish)) {}
  // Nobody has waited: the memory may be handed out again, but not before the device is done with it.
  ~StreamWork() override {
    try {
      if (!ops_.empty()) block();
    } catch (const std::exception&) {  // the device has failed: there is nothing left to protect
      ops_.clear();
    }
  }
  void wait() override {
    if (ops_.empty()) return;
    block();
    if (finish_) finish_();
    ops_.clear();
    finish_ = nullptr;
  }
  bool ready() override { return true; }  // wait() does not block the host
  bool ended() override { return false; }

 private:
  void block() {
    const c10::Device device = ops_[0].own().device();
    done_.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    events_->give(std::move(done_));
  }

  const std::shared_ptr<EventPool> events_;
  c10::Event done_;
  std::vector<Op> ops_;
  std::function<void()> finish_;
};

class NcclCommunicator : public Communicator, public OneQueue {
 public:
  NcclCommunicator(NcclCommPtr nccl, CommunicatorPtr host) : nccl_(std::move(nccl)), host_(std::move(host)) {}

  int rank() const override { return nccl_->rank(); }
  int size() const override { return nccl_->size(); }
  std::string name() const override { return "nccl"; }
  bool carries(const Op& op) const override {
    if (by_host(op)) return true;
    switch (op.verb) {
      case Verb::kAllToAll: return true;
      case Verb::kAllReduce:
      case Verb::kReduce:
      case Verb::kReduceScatter: {
        const at::ScalarType type = op.own().scalar_type();
        const bool small = at::isFloatingType(type) && op.own().element_size() == 1;
        if ((small && !nccl_->library()->has_float8()) || !nccl_type(type) || !nccl_op(op.reduce, type)) return false;
        return op.in_counts.empty() && op.out_counts.empty();
      }
      case Verb::kBroadcast:
      case Verb::kAllGather:
      case Verb::kSend:
      case Verb::kRecv: return op.peer != kAnyRank && op.in_counts.empty() && op.out_counts.empty();
      default: return false;
    }
  }
  bool groups() const override { return true; }
  WorkPtr run_all(const std::vector<Op>& ops) override {
    if (ops.empty()) return std::make_shared<DoneWork>();
    if (by_host(ops[0])) return host_->run_all(ops);
    return on_stream(ops, [&](void* stream) {
      nccl_->grouped([&] {
        for (const Op& op : ops) call(op, op.out, stream);
      });
    });
  }
  bool carries_host_memory() const override { return host_ != nullptr; }
  PeerMemoryPtr peer_memory(int64_t bytes) override { return host_ ? host_->peer_memory(bytes) : nullptr; }
  CommunicatorPtr among(const std::vector<int>& ranks) override { return host_ ? host_->among(ranks) : nullptr; }
  void abort(const std::string& why) noexcept override {
    nccl_->abort(why);
    if (host_) host_->abort(why);
  }
  void leave() override {
    nccl_->leave();
    if (host_) host_->leave();
  }

 protected:
  WorkPtr start(const Op& op) override {
    if (by_host(op)) return host_->run(op);
    if (op.more) {
      for (const Op& each : op.each())
        if (each.in.scalar_type() != each.out.scalar_type())
          fail(ErrorKind::kType, verb_name(op.verb), ": several tensors in one call keep their dtype");
      return on_stream({op}, [&](void* stream) {
        nccl_->grouped([&] {
          for (const Op& each : op.each()) call(each, each.out, stream);
        });
      });
    }
    at::Tensor out = op.out;
    std::function<void()> finish;
    if (op.verb == Verb::kReduceScatter && out.scalar_type() != op.in.scalar_type()) {
      out = at::empty_like(op.out, op.in.options());
      finish = [to = op.out, out] { to.copy_(out); };
    }
    return on_stream(
        {op}, [&](void* stream) { call(op, out, stream); }, std::move(finish));
  }

 private:
  bool by_host(const Op& op) const { return host_ && (op.verb == Verb::kBarrier || op.own().device().is_cpu()); }

  template <typename Call>
  WorkPtr on_stream(const std::vector<Op>& ops, const Call& make, std::function<void()> finish = nullptr) {
    const c10::Device device = ops[0].own().device();
    if (device.is_cpu()) {
      make(nullptr);
      if (finish) finish();
      return std::make_shared<DoneWork>();
    }
    const c10::impl::VirtualGuardImpl guard(device.type());
    if (!stream_) stream_ = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    if (!events_) events_ = std::make_shared<EventPool>(device.type());
    c10::Event ready = events_->take();
    ready.record(guard.getStream(device));
    ready.block(*stream_);
    events_->give(std::move(ready));
    c10::Event done = events_->take();
    make(native_stream(*stream_));
    done.record(*stream_);
    return std::make_shared<StreamWork>(events_, std::move(done), ops, std::move(finish));
  }

  // Types that NCCL does not know move as bytes.
  void call(const Op& op, const at::Tensor& out, void* stream) {
    const at::Tensor& own = op.own();
    const auto known = nccl_type(own.scalar_type());
    const nccl::DataType type =
        op.verb == Verb::kReduceScatter ? *nccl_type(op.in.scalar_type()) : known.value_or(nccl::kUint8);
    const size_t width = known ? 1 : own.element_size(), n = static_cast<size_t>(own.numel()) * width;
    void* const to = out.defined() ? out.data_ptr() : nullptr;
    const void* const from = op.in.defined() ? op.in.data_ptr() : to;
    const auto reduction = [&] { return *nccl_op(op.reduce, own.scalar_type()); };
    const auto counts = [&](const at::Tensor& whole, const std::vector<int64_t>& given) {
      std::vector<size_t> made(size(), static_cast<size_t>(whole.numel() / size()) * width);
      for (size_t r = 0; r < given.size(); ++r) made[r] = static_cast<size_t>(given[r]) * width;
      return made;
    };
    switch (op.verb) {
      case Verb::kAllReduce: return nccl_->all_reduce(to, to, n, type, reduction(), stream);
      case Verb::kReduce: return nccl_->reduce(to, to, n, type, reduction(), op.peer, stream);
      case Verb::kBroadcast: return nccl_->broadcast(to, to, n, type, op.peer, stream);
      case Verb::kReduceScatter: return nccl_->reduce_scatter(from, to, n, type, reduction(), stream);
      case Verb::kAllGather: return nccl_->all_gather(from, to, n, type, stream);
      case Verb::kAllToAll:
        return nccl_->all_to_all(from, counts(op.in, op.in_counts), to, counts(op.out, op.out_counts), type, stream);
      case Verb::kSend: return nccl_->send(from, n, type, op.peer, stream);
      case Verb::kRecv: return nccl_->recv(to, n, type, op.peer, stream);
      default: fail(ErrorKind::kNotImplemented, "NCCL has no ", verb_name(op.verb));
    }
  }

  NcclCommPtr nccl_;
  CommunicatorPtr host_;  // null: there is no other memory
  c10::optional<c10::Stream> stream_;
  std::shared_ptr<EventPool> events_;
};

}  // namespace

CommunicatorPtr nccl_communicator(NcclCommPtr nccl, CommunicatorPtr host) {
  if (!host || host->rank() != nccl->rank() || host->size() != nccl->size())
    fail(ErrorKind::kValue, "NCCL communicator \"", nccl->name(),
         "\" needs a communicator of the same ranks for tensors ", "in host memory");
  return std::make_shared<NcclCommunicator>(std::move(nccl), std::move(host));
}

CommunicatorPtr nccl_communicator_alone(NcclCommPtr nccl) {
  return std::make_shared<NcclCommunicator>(std::move(nccl), nullptr);
}

}  // namespace ds::comm

#include "comm/scripts/c10d_backend.h"

#include <utility>

#include "base/blocking_region.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/process.h"
#include "base/ranges.h"
#include "comm/scripts/script_calls.h"

namespace ds::comm {

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkHandle = c10::intrusive_ptr<c10d::Work>;

bool dense(const at::Tensor& tensor) { return tensor.layout() == at::kStrided; }
bool dense_on_host(const at::Tensor& tensor) { return tensor.device().is_cpu() && dense(tensor); }
bool planned(const at::Tensor& tensor) { return tensor.is_meta() && dense(tensor); }

class C10dBackend : public compat::BackendBase {
 public:
  C10dBackend(CommunicatorPtr communicator, BackendPtr other, std::string name)
      : compat::BackendBase(communicator->rank(), communicator->size()),
        communicator_(communicator),
        calls_(std::make_unique<ScriptCalls>(std::move(communicator))),
        other_(std::move(other)),
        name_(std::move(name)) {}
  ~C10dBackend() override {
    if (!owner_.here()) {  // the threads of both are the parent's
      (void)other_.release();
      (void)calls_.release();
      new CommunicatorPtr(std::move(communicator_));
      return;
    }
    in_blocking_region([this] {
      calls_.reset();
      communicator_.reset();
      other_.reset();
    });
  }

  const std::string getBackendName() const override { return name_; }

  WorkHandle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    if (!carries(tensors)) return other().broadcast(tensors, options);
    return run(call(Verb::kBroadcast, {}, {only(tensors)}, options.rootRank), options);
  }
  WorkHandle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (!carries(tensors)) return other().allreduce(tensors, options);
    return run(reduction(Verb::kAllReduce, {}, {only(tensors)}, options), options);
  }
  WorkHandle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    if (!carries(tensors)) return other().allreduce_coalesced(tensors, options);
    std::vector<ListCall> calls;
    for (const at::Tensor& each : tensors) calls.push_back(reduction(Verb::kAllReduce, {}, {each}, options));
    return run(std::move(calls), options);
  }
  WorkHandle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    if (!carries(tensors)) return other().reduce(tensors, options);
    return run(reduction(Verb::kReduce, {}, {only(tensors)}, options, options.rootRank), options);
  }

  WorkHandle allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    if (!carries(inputs)) return other().allgather(outputs, inputs, options);
    return run(call(Verb::kAllGather, {only(inputs)}, only(outputs)), options);
  }
  WorkHandle allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) override {
    if (!carries(inputs)) return other().allgather_coalesced(outputs, inputs, options);
    std::vector<ListCall> calls;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors each;
      for (const Tensors& of_rank : outputs) {
        if (of_rank.size() != inputs.size())
          fail(ErrorKind::kValue, "all_gather_coalesced: ", inputs.size(), " inputs, and a rank's list of ",
               of_rank.size(), " outputs: give as many");
        each.push_back(of_rank[i]);
      }
      calls.push_back(call(Verb::kAllGather, {inputs[i]}, each));
    }
    return run(std::move(calls), options);
  }
  WorkHandle _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    if (!carries({output, input})) return other()._allgather_base(output, input, options);
    return run(call(Verb::kAllGather, {input}, {output}), options);
  }

  WorkHandle gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    if (!carries(inputs)) return other().gather(outputs, inputs, options);
    const Tensors each = options.rootRank == getRank() ? only(outputs) : Tensors();
    return run(call(Verb::kGather, {only(inputs)}, each, options.rootRank), options);
  }
  WorkHandle scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    if (!carries(outputs)) return other().scatter(outputs, inputs, options);
    const Tensors each = options.rootRank == getRank() ? only(inputs) : Tensors();
    return run(call(Verb::kScatter, each, {only(outputs)}, options.rootRank), options);
  }

  WorkHandle reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                            const c10d::ReduceScatterOptions& options) override {
    if (!carries(outputs)) return other().reduce_scatter(outputs, inputs, options);
    return run(reduction(Verb::kReduceScatter, only(inputs), {only(outputs)}, options), options);
  }
  WorkHandle _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                  const c10d::ReduceScatterOptions& options) override {
    if (!carries({output, input})) return other()._reduce_scatter_base(output, input, options);
    return run(reduction(Verb::kReduceScatter, {input}, {output}, options), options);
  }

  WorkHandle alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                           std::vector<int64_t>& input_rows, const c10d::AllToAllOptions& options) override {
    if (!carries({output, input})) return other().alltoall_base(output, input, output_rows, input_rows, options);
    ListCall exchange = call(Verb::kAllToAll, {input}, {output});
    exchange.in_splits = input_rows;
    exchange.out_splits = output_rows;
    return run(std::move(exchange), options);
  }
  WorkHandle alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    if (!carries(outputs) || !carries(inputs)) return other().alltoall(outputs, inputs, options);
    if (static_cast<int>(outputs.size()) != getSize() || static_cast<int>(inputs.size()) != getSize())
      fail(ErrorKind::kValue, "all_to_all: there must be one input and one output for each of the ", getSize(),
           " ranks");
    return run(call(Verb::kAllToAll, inputs, outputs), options);
  }

  WorkHandle barrier(const c10d::BarrierOptions& options) override {
    return run(call(Verb::kBarrier, {}, {}), options);
  }

  WorkHandle send(Tensors& tensors, int to, int tag) override {
    return carries(tensors) ? message(call(Verb::kSend, {only(tensors)}, {}, to), tag) : other().send(tensors, to, tag);
  }
  WorkHandle recv(Tensors& tensors, int from, int tag) override {
    return carries(tensors) ? received(tensors, from, tag) : other().recv(tensors, from, tag);
  }
  WorkHandle recvAnysource(Tensors& tensors, int tag) override {
    return carries(tensors) ? received(tensors, kAnyRank, tag) : other().recvAnysource(tensors, tag);
  }
  const CommunicatorPtr& communicator() const { return communicator_; }

  // Exists in torch 2.x only: without `override`, so that the same text serves both.
  WorkHandle allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
    check_pairs(Verb::kAllGather, outputs, inputs);
    if (!carries(outputs) || !carries(inputs))
      return one_by_one(inputs.size(),
                        [&](size_t i) { return other()._allgather_base(outputs[i], inputs[i], options); });
    std::vector<ListCall> calls;
    for (size_t i = 0; i < outputs.size(); ++i) calls.push_back(call(Verb::kAllGather, {inputs[i]}, {outputs[i]}));
    return run(std::move(calls), options);
  }
  WorkHandle reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                             const c10d::ReduceScatterOptions& options) {
    check_pairs(Verb::kReduceScatter, outputs, inputs);
    if (!carries(outputs) || !carries(inputs))
      return one_by_one(inputs.size(),
                        [&](size_t i) { return other()._reduce_scatter_base(outputs[i], inputs[i], options); });
    std::vector<ListCall> calls;
    for (size_t i = 0; i < outputs.size(); ++i)
      calls.push_back(reduction(Verb::kReduceScatter, {inputs[i]}, {outputs[i]}, options));
    return run(std::move(calls), options);
  }
  bool supportsCoalescing() const { return false; }
  void setTimeout(milliseconds timeout) { communicator_->set_timeout(timeout); }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }

 private:
  compat::BackendBase& other() const {
    if (!other_) fail(ErrorKind::kNotImplemented, "the backend ", name_, " carries dense tensors in host memory only");
    return *other_;
  }
  bool carries(const Tensors& tensors) const {
    return all_of(tensors, dense_on_host) || (counted() && all_of(tensors, planned));
  }
  bool counted() const { return communicator_->name() == "counted"; }

  template <typename T>
  const T& only(const std::vector<T>& list) const {
    if (list.size() != 1)
      fail(ErrorKind::kValue, "the backend ", name_, " takes one tensor for each rank, got ", list.size());
    return list[0];
  }

  ReduceOp reduce_op(const c10d::ReduceOp& op) const {
    switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
      case c10d::ReduceOp::SUM: return ReduceOp::kSum;
      case c10d::ReduceOp::AVG: return ReduceOp::kAvg;
      case c10d::ReduceOp::PRODUCT: return ReduceOp::kProduct;
      case c10d::ReduceOp::MIN: return ReduceOp::kMin;
      case c10d::ReduceOp::MAX: return ReduceOp::kMax;
      case c10d::ReduceOp::BAND: return ReduceOp::kAnd;
      case c10d::ReduceOp::BOR: return ReduceOp::kOr;
      case c10d::ReduceOp::BXOR: return ReduceOp::kXor;
      default:
        fail(ErrorKind::kNotImplemented, "the backend ", name_,
             " has no such reduction; use sum, avg, product, min, max, band, bor or bxor");
    }
  }

  static ListCall call(Verb verb, Tensors in, Tensors out, int64_t root = -1) {
    return {verb, std::move(in), std::move(out), {}, {}, ReduceOp::kSum, static_cast<int>(root)};
  }
  template <typename Options>
  ListCall reduction(Verb verb, Tensors in, Tensors out, const Options& options, int64_t root = -1) const {
    ListCall made = call(verb, std::move(in), std::move(out), root);
    made.reduce = reduce_op(options.reduceOp);
    return made;
  }

  // Checks calls of several outputs, each with an input of its own.
  static void check_pairs(Verb verb, const Tensors& outputs, const Tensors& inputs) {
    if (outputs.size() != inputs.size())
      fail(ErrorKind::kValue, verb_name(verb), ": ", inputs.size(), " inputs for ", outputs.size(), " outputs");
  }

  // The handle of the last of some calls; all others have ended.
  template <typename Call>
  static WorkHandle one_by_one(size_t count, const Call& call) {
    WorkHandle last;
    for (size_t i = 0; i < count; ++i) {
      if (last) last->wait();
      last = call(i);
    }
    return last;
  }

  WorkHandle message(ListCall call, int tag) {
    call.message_tag = tag;
    call.detached = true;
    return calls_->run(std::move(call));
  }

  WorkHandle received(const Tensors& tensors, int from, int tag) {
    return message(call(Verb::kRecv, {}, {only(tensors)}, from), tag);
  }

  template <typename Options>
  WorkHandle run(ListCall call, const Options& options) {
    std::vector<ListCall> one;
    one.push_back(std::move(call));
    return run(std::move(one), options);
  }
  template <typename Options>
  WorkHandle run(std::vector<ListCall> calls, const Options& options) {
    ++number_;
    for (ListCall& each : calls) each.detached = compat::runs_later(options).value_or(true);
    return calls_->handle(std::move(calls));
  }

  CommunicatorPtr communicator_;
  std::unique_ptr<ScriptCalls> calls_;
  BackendPtr other_;  // may be null
  const std::string name_;
  const OwningProcess owner_;
  uint64_t number_ = 0;
};

}  // namespace

CommunicatorPtr communicator_of(const BackendPtr& backend) {
  const auto* ours = dynamic_cast<const C10dBackend*>(backend.get());
  return ours ? ours->communicator() : nullptr;
}

BackendPtr c10d_backend(CommunicatorPtr communicator, BackendPtr other, std::string name) {
  return c10::make_intrusive<C10dBackend>(std::move(communicator), std::move(other), std::move(name));
}

}  // namespace ds::comm

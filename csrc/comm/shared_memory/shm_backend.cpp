#include "comm/shared_memory/shm_backend.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include "base/error.h"
#include "base/process.h"
#include "comm/calls/call_check.h"
#include "comm/shared_memory/shm_c10d_work.h"
#include "comm/shared_memory/store_rendezvous.h"

namespace ds::comm {

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkHandle = c10::intrusive_ptr<c10d::Work>;

ReduceOp reduce_op(const c10d::ReduceOp& op) {
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
      fail(ErrorKind::kNotImplemented,
           "the backend shm has no such reduction; use sum, avg, product, min, max, "
           "band, bor or bxor");
  }
}

size_t elements(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()); }

bool plain(const at::Tensor& tensor) { return tensor.device().is_cpu() && tensor.layout() == at::kStrided; }
bool plain(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors)
    if (!plain(tensor)) return false;
  return true;
}

// `tensor` itself, or its elements in order in memory of their own, which finish() copies back.
struct InOrder {
  explicit InOrder(const at::Tensor& tensor) : given(tensor), used(tensor.contiguous()) {}
  void finish() const {
    if (used.is_same(given)) return;
    at::NoGradGuard no_grad;
    given.copy_(used);
  }
  at::Tensor given, used;
};

// The same for a list of one tensor for each rank.
struct ListInOrder {
  explicit ListInOrder(const Tensors& tensors) {
    for (const at::Tensor& tensor : tensors) each.emplace_back(tensor);
  }
  void finish() const {
    for (const InOrder& one : each) one.finish();
  }
  Rows rows() const {
    Rows made;
    for (const InOrder& one : each) made.push_back(static_cast<char*>(one.used.data_ptr()));
    return made;
  }
  std::vector<InOrder> each;
};

Rows even_rows(const at::Tensor& all, int count) {
  return rows_of(all.data_ptr(), count, all.nbytes() / static_cast<size_t>(count));
}

class ShmBackend : public compat::BackendBase {
 public:
  ShmBackend(int rank, int size, std::unique_ptr<ShmGroup> group, BackendPtr other, BlockingRegion blocking_region)
      : compat::BackendBase(rank, size),
        queue_(group ? std::make_shared<ShmQueue>(std::move(group)) : nullptr),
        other_(std::move(other)),
        blocking_region_(std::move(blocking_region)) {}
  // gloo's end waits for its threads, which may need the interpreter's lock to let go of a tensor: not with the lock.
  ~ShmBackend() override {
    if (!owner_.here()) {
      (void)other_.release();  // its threads are the parent's
    } else if (blocking_region_) {
      blocking_region_([this] { other_.reset(); });
    }
  }

  const std::string getBackendName() const override { return "shm"; }
  bool shares_memory() const { return queue_ != nullptr; }

  WorkHandle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    if (!carries(tensors)) return other().broadcast(tensors, options);
    const int root = static_cast<int>(options.rootRank);
    check(Verb::kBroadcast, {}, {only(tensors)}, root);
    const InOrder tensor(only(tensors));
    return start(c10d::OpType::BROADCAST, tensors, options, [tensor, root](ShmGroup& group) {
      group.broadcast(tensor.used.data_ptr(), elements(tensor.used), tensor.used.scalar_type(), root);
      tensor.finish();
    });
  }

  WorkHandle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (!carries(tensors)) return other().allreduce(tensors, options);
    const InOrder tensor(only(tensors));
    const ReduceOp op = reduce_op(options.reduceOp);
    return start(c10d::OpType::ALLREDUCE, tensors, options, [tensor, op](ShmGroup& group) {
      group.all_reduce(tensor.used.data_ptr(), elements(tensor.used), tensor.used.scalar_type(), op);
      tensor.finish();
    });
  }

  WorkHandle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    if (!carries(tensors)) return other().allreduce_coalesced(tensors, options);
    const ReduceOp op = reduce_op(options.reduceOp);
    return start(c10d::OpType::ALLREDUCE_COALESCED, tensors, options, [tensors, op](ShmGroup& group) {
      for (const at::Tensor& each : tensors) {
        const InOrder tensor(each);
        group.all_reduce(tensor.used.data_ptr(), elements(tensor.used), tensor.used.scalar_type(), op);
        tensor.finish();
      }
    });
  }

  WorkHandle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    if (!carries(tensors)) return other().reduce(tensors, options);
    const ReduceOp op = reduce_op(options.reduceOp);
    const int root = static_cast<int>(options.rootRank);
    check(Verb::kReduce, {}, {only(tensors)}, root);
    const InOrder tensor(only(tensors));
    return start(c10d::OpType::REDUCE, tensors, options, [tensor, op, root](ShmGroup& group) {
      group.reduce(tensor.used.data_ptr(), elements(tensor.used), tensor.used.scalar_type(), op, root);
      if (group.rank() == root) tensor.finish();
    });
  }

  WorkHandle allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    if (!carries(inputs)) return other().allgather(outputs, inputs, options);
    const at::Tensor mine = only(inputs).contiguous();
    const Tensors each = only(outputs);
    check(Verb::kAllGather, inputs, each);
    return start(c10d::OpType::ALLGATHER, each, options, [mine, all = ListInOrder(each)](ShmGroup& group) {
      group.all_gather(all.rows(), mine.data_ptr(), elements(mine), mine.scalar_type());
      all.finish();
    });
  }

  WorkHandle allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) override {
    if (!carries(inputs)) return other().allgather_coalesced(outputs, inputs, options);
    Tensors results;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors each;
      for (const Tensors& of_rank : outputs) {
        if (of_rank.size() != inputs.size())
          fail(ErrorKind::kValue, "all_gather_coalesced: ", inputs.size(), " inputs, and a rank's list of ",
               of_rank.size(), " outputs: give as many");
        each.push_back(of_rank[i]);
      }
      check(Verb::kAllGather, {inputs[i]}, each);
      results.insert(results.end(), each.begin(), each.end());
    }
    return start(c10d::OpType::ALLGATHER_COALESCED, results, options, [outputs, inputs](ShmGroup& group) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        const at::Tensor mine = inputs[i].contiguous();
        Tensors each;
        for (const Tensors& of_rank : outputs) each.push_back(of_rank[i]);
        const ListInOrder all(each);
        group.all_gather(all.rows(), mine.data_ptr(), elements(mine), mine.scalar_type());
        all.finish();
      }
    });
  }

  WorkHandle _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    if (!carries({output, input})) return other()._allgather_base(output, input, options);
    check(Verb::kAllGather, {input}, {output});
    return start(c10d::OpType::_ALLGATHER_BASE, {output}, options,
                 [output, input](ShmGroup& group) { gather_into(group, output, input); });
  }

  WorkHandle gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    if (!carries(inputs)) return other().gather(outputs, inputs, options);
    const at::Tensor mine = only(inputs).contiguous();
    const int root = static_cast<int>(options.rootRank);
    const Tensors each = getRank() == root ? only(outputs) : Tensors();
    check(Verb::kGather, inputs, each, root);
    return start(c10d::OpType::GATHER, each, options, [mine, all = ListInOrder(each), root](ShmGroup& group) {
      group.gather(all.rows(), mine.data_ptr(), elements(mine), mine.scalar_type(), root);
      all.finish();
    });
  }

  WorkHandle scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    if (!carries(outputs)) return other().scatter(outputs, inputs, options);
    const InOrder mine(only(outputs));
    const int root = static_cast<int>(options.rootRank);
    const Tensors each = getRank() == root ? only(inputs) : Tensors();
    check(Verb::kScatter, each, outputs, root);
    return start(c10d::OpType::SCATTER, outputs, options, [mine, all = ListInOrder(each), root](ShmGroup& group) {
      group.scatter(mine.used.data_ptr(), all.rows(), elements(mine.used), mine.used.scalar_type(), root);
      mine.finish();
    });
  }

  WorkHandle reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                            const c10d::ReduceScatterOptions& options) override {
    if (!carries(outputs)) return other().reduce_scatter(outputs, inputs, options);
    const InOrder mine(only(outputs));
    const Tensors each = only(inputs);
    check(Verb::kReduceScatter, each, outputs);
    const ReduceOp op = reduce_op(options.reduceOp);
    return start(c10d::OpType::REDUCE_SCATTER, outputs, options, [mine, all = ListInOrder(each), op](ShmGroup& group) {
      group.reduce_scatter(mine.used.data_ptr(), all.rows(), elements(mine.used), mine.used.scalar_type(), op, false);
      mine.finish();
    });
  }

  WorkHandle _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                  const c10d::ReduceScatterOptions& options) override {
    if (!carries({output, input})) return other()._reduce_scatter_base(output, input, options);
    check(Verb::kReduceScatter, {input}, {output});
    const ReduceOp op = reduce_op(options.reduceOp);
    return start(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, options,
                 [output, input, op](ShmGroup& group) { reduce_into(group, output, input, op); });
  }

  WorkHandle alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                           std::vector<int64_t>& input_rows, const c10d::AllToAllOptions& options) override {
    if (!carries({output, input})) return other().alltoall_base(output, input, output_rows, input_rows, options);
    check(Verb::kAllToAll, {input}, {output}, -1, input_rows, output_rows);
    const InOrder to(output);
    const at::Tensor from = input.contiguous();
    const auto take = counts(output, output_rows), give = counts(input, input_rows);
    return start(c10d::OpType::ALLTOALL_BASE, {output}, options, [to, from, take, give](ShmGroup& group) {
      group.all_to_all(rows_at(to.used.data_ptr(), take, to.used.element_size()), take,
                       rows_at(from.data_ptr(), give, from.element_size()), give, from.scalar_type());
      to.finish();
    });
  }

  WorkHandle alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    if (!carries(outputs) || !carries(inputs)) return other().alltoall(outputs, inputs, options);
    if (static_cast<int>(outputs.size()) != getSize() || static_cast<int>(inputs.size()) != getSize())
      fail(ErrorKind::kValue, "all_to_all: there must be one input and one output for each of the ", getSize(),
           " ranks");
    check(Verb::kAllToAll, inputs, outputs);
    std::vector<int64_t> take, give;
    for (const at::Tensor& tensor : outputs) take.push_back(tensor.numel());
    for (const at::Tensor& tensor : inputs) give.push_back(tensor.numel());
    const ListInOrder to(outputs), from(inputs);
    return start(c10d::OpType::ALLTOALL, outputs, options, [to, from, take, give](ShmGroup& group) {
      group.all_to_all(to.rows(), take, from.rows(), give, from.each[0].used.scalar_type());
      to.finish();
    });
  }

  WorkHandle barrier(const c10d::BarrierOptions& options) override {
    if (!queue_) return other().barrier(options);
    return start(c10d::OpType::BARRIER, {}, options, [](ShmGroup& group) { group.barrier(); });
  }

  WorkHandle send(Tensors& tensors, int to, int tag) override { return other().send(tensors, to, tag); }
  WorkHandle recv(Tensors& tensors, int from, int tag) override { return other().recv(tensors, from, tag); }
  WorkHandle recvAnysource(Tensors& tensors, int tag) override { return other().recvAnysource(tensors, tag); }

  // Of 2.x only: without `override`, so that the same text serves both.
  WorkHandle allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
    const auto one_by_one = [&](size_t i) { return other()._allgather_base(outputs[i], inputs[i], options); };
    check_pairs(Verb::kAllGather, outputs, inputs);
    if (!carries(outputs) || !carries(inputs)) return all_of(c10d::OpType::_ALLGATHER_BASE, outputs, one_by_one);
    return start(c10d::OpType::_ALLGATHER_BASE, outputs, options, [outputs, inputs](ShmGroup& group) {
      for (size_t i = 0; i < outputs.size(); ++i) gather_into(group, outputs[i], inputs[i]);
    });
  }
  WorkHandle reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                             const c10d::ReduceScatterOptions& options) {
    const auto one_by_one = [&](size_t i) { return other()._reduce_scatter_base(outputs[i], inputs[i], options); };
    check_pairs(Verb::kReduceScatter, outputs, inputs);
    if (!carries(outputs) || !carries(inputs)) return all_of(c10d::OpType::_REDUCE_SCATTER_BASE, outputs, one_by_one);
    const ReduceOp op = reduce_op(options.reduceOp);
    return start(c10d::OpType::_REDUCE_SCATTER_BASE, outputs, options, [outputs, inputs, op](ShmGroup& group) {
      for (size_t i = 0; i < outputs.size(); ++i) reduce_into(group, outputs[i], inputs[i], op);
    });
  }
  bool supportsCoalescing() const { return false; }
  void setTimeout(std::chrono::milliseconds timeout) {
    if (queue_) queue_->group().channel().set_timeout(timeout);
  }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return queue_ ? static_cast<uint64_t>(queue_->group().channel().entered()) : 0;
  }

 private:
  compat::BackendBase& other() const {
    if (!other_) fail(ErrorKind::kNotImplemented, "this group carries CPU tensors in memory that all ranks share only");
    return *other_;
  }

  bool carries(const Tensors& tensors) const { return queue_ && plain(tensors); }

  template <typename T>
  static const T& only(const std::vector<T>& list) {
    if (list.size() != 1) fail(ErrorKind::kValue, "the backend shm takes one tensor for each rank, got ", list.size());
    return list[0];
  }

  void check(Verb verb, const Tensors& in, const Tensors& out, int root = -1, const std::vector<int64_t>& in_rows = {},
             const std::vector<int64_t>& out_rows = {}) const {
    const ListCall call{verb, in, out, in_rows, out_rows, ReduceOp::kSum, root, false};
    check_call(call, getRank(), getSize());
  }
  // Of calls of several outputs, each with an input of its own.
  void check_pairs(Verb verb, const Tensors& outputs, const Tensors& inputs) const {
    if (outputs.size() != inputs.size())
      fail(ErrorKind::kValue, verb_name(verb), ": ", inputs.size(), " inputs for ", outputs.size(), " outputs");
    for (size_t i = 0; i < outputs.size(); ++i) check(verb, {inputs[i]}, {outputs[i]});
  }

  static void gather_into(ShmGroup& group, const at::Tensor& output, const at::Tensor& input) {
    const InOrder all(output);
    const at::Tensor mine = input.contiguous();
    group.all_gather(even_rows(all.used, group.size()), mine.data_ptr(), elements(mine), mine.scalar_type());
    all.finish();
  }
  static void reduce_into(ShmGroup& group, const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
    const InOrder mine(output);
    const at::Tensor all = input.contiguous();
    group.reduce_scatter(mine.used.data_ptr(), even_rows(all, group.size()), elements(mine.used), all.scalar_type(), op,
                         false);
    mine.finish();
  }

  template <typename Call>
  static WorkHandle all_of(c10d::OpType type, const Tensors& results, const Call& call) {
    std::vector<WorkHandle> works;
    for (size_t i = 0; i < results.size(); ++i) works.push_back(call(i));
    return c10::make_intrusive<AllOf>(type, std::move(works), results);
  }

  // In elements, of splits that fit.
  std::vector<int64_t> counts(const at::Tensor& tensor, const std::vector<int64_t>& rows) const {
    const int64_t n = getSize(), first = tensor.dim() > 0 ? tensor.size(0) : 1;
    if (rows.empty()) return std::vector<int64_t>(n, tensor.numel() / n);
    std::vector<int64_t> result;
    for (int64_t row : rows) result.push_back(first ? row * (tensor.numel() / first) : 0);
    return result;
  }

  template <typename AnyOptions>
  WorkHandle start(c10d::OpType type, const Tensors& results, const AnyOptions& options,
                   std::function<void(ShmGroup&)> run) {
    auto work = c10::make_intrusive<ShmC10dWork>(queue_, type, results);
    work->start(std::move(run), compat::runs_later(options));
    return work;
  }

  std::shared_ptr<ShmQueue> queue_;  // null: the ranks do not share a host
  BackendPtr other_;                 // may be null
  const OwningProcess owner_;
  BlockingRegion blocking_region_;
};

}  // namespace

BackendPtr shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, BackendPtr other, const GroupFacts& facts) {
  if (!on_one_host(store, rank, size))
    return c10::make_intrusive<ShmBackend>(rank, size, nullptr, std::move(other), facts.blocking_region);
  auto group = ShmGroup::create(rank, size, rendezvous_over_store(store, rank, size), timeout, facts);
  return c10::make_intrusive<ShmBackend>(rank, size, std::move(group), std::move(other), facts.blocking_region);
}

bool shares_memory(const BackendPtr& backend) {
  const auto* ours = dynamic_cast<const ShmBackend*>(backend.get());
  return ours != nullptr && ours->shares_memory();
}

}  // namespace ds::comm

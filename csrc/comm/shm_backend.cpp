#include "comm/shm_backend.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <numeric>

#include "base/error.h"
#include "base/process.h"
#include "comm/shared_segments.h"
#include "comm/shm_queue.h"

namespace ds::comm {

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkHandle = c10::intrusive_ptr<c10d::Work>;
using Options = c10d::AllreduceOptions;

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

// One collective. Its result is in the tensors themselves.
class ShmC10dWork : public c10d::Work {
 public:
  ShmC10dWork(std::shared_ptr<ShmQueue> queue, c10d::OpType type, Tensors results)
      : c10d::Work(-1, type),
        queue_(std::move(queue)),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  void start(std::function<void(ShmGroup&)> run, c10::optional<bool> later) {
    // Not `this` but the future: whoever waits for it may be all that is left of this call.
    const auto how = !later   ? ShmQueue::Start::kPerhapsLater
                     : *later ? ShmQueue::Start::kSoon
                              : ShmQueue::Start::kByWaiting;
    task_ = queue_->submit(std::move(run), how, [future = future_, results = results_](std::exception_ptr error) {
      if (error) {
        future->setError(error);
      } else {
        future->markCompleted(c10::IValue(results));
      }
    });
    if (how == ShmQueue::Start::kByWaiting) queue_->complete(task_);
  }

  bool isCompleted() override { return task_->done(); }
  bool isSuccess() const override { return task_->done() && !task_->error(); }
  std::exception_ptr exception() const override { return task_->done() ? task_->error() : nullptr; }
  bool wait(std::chrono::milliseconds) override {
    queue_->complete(task_);
    return true;
  }
  void synchronize() override {}
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::shared_ptr<ShmQueue> queue_;
  ShmQueue::TaskPtr task_;
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

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
    const InOrder tensor(only(tensors));
    const int root = static_cast<int>(options.rootRank);
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
    const InOrder tensor(only(tensors));
    const ReduceOp op = reduce_op(options.reduceOp);
    const int root = static_cast<int>(options.rootRank);
    return start(c10d::OpType::REDUCE, tensors, options, [tensor, op, root](ShmGroup& group) {
      group.reduce(tensor.used.data_ptr(), elements(tensor.used), tensor.used.scalar_type(), op, root);
      if (group.rank() == root) tensor.finish();
    });
  }

  WorkHandle allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    if (!carries(inputs)) return other().allgather(outputs, inputs, options);
    const at::Tensor mine = only(inputs).contiguous();
    const Tensors each = only(outputs);
    check_rows(each, mine.numel(), "all_gather");
    return start(c10d::OpType::ALLGATHER, each, options, [mine, all = ListInOrder(each)](ShmGroup& group) {
      group.all_gather(all.rows(), mine.data_ptr(), elements(mine), mine.scalar_type());
      all.finish();
    });
  }

  WorkHandle allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) override {
    if (!carries(inputs)) return other().allgather_coalesced(outputs, inputs, options);
    Tensors results;
    for (const Tensors& list : outputs) results.insert(results.end(), list.begin(), list.end());
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
    if (output.numel() != input.numel() * getSize())
      fail(ErrorKind::kValue, "all_gather_into_tensor: the output has ", output.numel(), " elements, the input ",
           input.numel(), "; over ", getSize(), " ranks the output must have ", input.numel() * getSize(), ".");
    const InOrder all(output);
    const at::Tensor mine = input.contiguous();
    return start(c10d::OpType::_ALLGATHER_BASE, {output}, options, [all, mine](ShmGroup& group) {
      group.all_gather(even_rows(all.used, group.size()), mine.data_ptr(), elements(mine), mine.scalar_type());
      all.finish();
    });
  }

  WorkHandle gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    if (!carries(inputs)) return other().gather(outputs, inputs, options);
    const at::Tensor mine = only(inputs).contiguous();
    const int root = static_cast<int>(options.rootRank);
    const Tensors each = getRank() == root ? only(outputs) : Tensors();
    if (getRank() == root) check_rows(each, mine.numel(), "gather");
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
    if (getRank() == root) check_rows(each, mine.used.numel(), "scatter");
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
    check_rows(each, mine.used.numel(), "reduce_scatter");
    const ReduceOp op = reduce_op(options.reduceOp);
    return start(c10d::OpType::REDUCE_SCATTER, outputs, options, [mine, all = ListInOrder(each), op](ShmGroup& group) {
      group.reduce_scatter(mine.used.data_ptr(), all.rows(), elements(mine.used), mine.used.scalar_type(), op, false);
      mine.finish();
    });
  }

  WorkHandle _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                  const c10d::ReduceScatterOptions& options) override {
    if (!carries({output, input})) return other()._reduce_scatter_base(output, input, options);
    if (input.numel() != output.numel() * getSize())
      fail(ErrorKind::kValue, "reduce_scatter_tensor: the input has ", input.numel(), " elements, the output ",
           output.numel(), "; over ", getSize(), " ranks the input must have ", output.numel() * getSize(), ".");
    const InOrder mine(output);
    const at::Tensor all = input.contiguous();
    const ReduceOp op = reduce_op(options.reduceOp);
    return start(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, options, [mine, all, op](ShmGroup& group) {
      group.reduce_scatter(mine.used.data_ptr(), even_rows(all, group.size()), elements(mine.used), all.scalar_type(),
                           op, false);
      mine.finish();
    });
  }

  WorkHandle alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                           std::vector<int64_t>& input_rows, const c10d::AllToAllOptions& options) override {
    if (!carries({output, input})) return other().alltoall_base(output, input, output_rows, input_rows, options);
    const InOrder to(output);
    const at::Tensor from = input.contiguous();
    const auto take = counts(output, output_rows, "output"), give = counts(input, input_rows, "input");
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
    WorkHandle last;
    for (size_t i = 0; i < outputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], options);
    return last;  // they run in order: when the last has run, all have
  }
  WorkHandle reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                             const c10d::ReduceScatterOptions& options) {
    WorkHandle last;
    for (size_t i = 0; i < outputs.size(); ++i) last = _reduce_scatter_base(outputs[i], inputs[i], options);
    return last;
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

  void check_rows(const Tensors& rows, int64_t numel, const char* what) const {
    if (static_cast<int>(rows.size()) != getSize())
      fail(ErrorKind::kValue, what, ": there must be one tensor for each of the ", getSize(), " ranks, got ",
           rows.size());
    for (const at::Tensor& row : rows)
      if (row.numel() != numel)
        fail(ErrorKind::kValue, what, ": all tensors must have ", numel, " elements, one has ", row.numel());
  }

  std::vector<int64_t> counts(const at::Tensor& tensor, const std::vector<int64_t>& rows, const char* which) const {
    const int64_t n = getSize(), first = tensor.dim() > 0 ? tensor.size(0) : 1;
    if (rows.empty()) {
      if (first % n != 0)
        fail(ErrorKind::kValue, "all_to_all_single: the first dimension of the ", which, ", ", first,
             ", cannot be divided by ", n, " ranks; give the split sizes");
      return std::vector<int64_t>(n, tensor.numel() / n);
    }
    if (static_cast<int64_t>(rows.size()) != n || std::accumulate(rows.begin(), rows.end(), int64_t{0}) != first)
      fail(ErrorKind::kValue, "all_to_all_single: the split sizes of the ", which, " must be ", n,
           " numbers that add up to its first dimension, ", first);
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

// Whether all ranks are on one host, for a few words of each: what the segments say of each other would be too much
// where many ranks are on many hosts.
bool on_one_host(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  const auto bytes_of = [](int64_t id) {
    std::vector<uint8_t> bytes(sizeof id);
    std::memcpy(bytes.data(), &id, sizeof id);
    return bytes;
  };
  const std::vector<uint8_t> mine = bytes_of(host_id());
  if (rank != 0) {
    store->set("deepspeed/host/" + std::to_string(rank), mine);
  } else {
    bool one = true;
    for (int r = 1; r < size; ++r) one = store->get("deepspeed/host/" + std::to_string(r)) == mine && one;
    store->set("deepspeed/host/one", std::vector<uint8_t>{static_cast<uint8_t>(one)});
  }
  return store->get("deepspeed/host/one") == std::vector<uint8_t>{1};
}

Rendezvous rendezvous_over_store(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  Rendezvous made;
  const auto round = std::make_shared<int>(0);
  made.exchange = [=](const SegmentFacts& mine) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&mine);
    store->set("deepspeed/shm/" + std::to_string(rank), std::vector<uint8_t>(bytes, bytes + sizeof(mine)));
    std::vector<SegmentFacts> all(size);
    for (int r = 0; r < size; ++r) {
      const std::vector<uint8_t> theirs = store->get("deepspeed/shm/" + std::to_string(r));
      if (theirs.size() == sizeof(SegmentFacts)) std::memcpy(&all[r], theirs.data(), sizeof(SegmentFacts));
    }
    return all;
  };
  made.all = [=](bool ok) {
    const std::string key = "deepspeed/shm/ok" + std::to_string((*round)++) + "/";
    store->set(key + std::to_string(rank), std::vector<uint8_t>{static_cast<uint8_t>(ok)});
    for (int r = 0; r < size; ++r) {
      const std::vector<uint8_t> theirs = store->get(key + std::to_string(r));
      ok = ok && theirs.size() == 1 && theirs[0] == 1;
    }
    return ok;
  };
  return made;
}

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

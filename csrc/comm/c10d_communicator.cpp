#include "comm/c10d_communicator.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <functional>
#include <mutex>

#include "base/error.h"
#include "base/process.h"
#include "comm/c10d_compat.h"
#include "comm/process_peer_memory.h"

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

// Memory that transfers land in, kept between calls: the first touch of fresh pages costs more than the transfer.
class Scratch {
 public:
  at::Tensor take(int64_t numel, at::ScalarType type) {
    const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(type));
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->numel() != bytes) continue;
      at::Tensor found = *it;
      free_.erase(it);
      return found.view(type);
    }
    return at::empty({bytes}, at::TensorOptions().dtype(at::kByte)).view(type);
  }
  void give(const at::Tensor& tensor) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(tensor.view(at::kByte));
    if (free_.size() > kMost) free_.erase(free_.begin());
  }

 private:
  static constexpr size_t kMost = 16;
  std::mutex mutex_;
  std::vector<at::Tensor> free_;
};

class C10dCommunicator : public Communicator {
 public:
  C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, BlockingRegion blocking_region)
      : blocking_region_(std::move(blocking_region)),
        group_(std::move(group)),
        name_(group_->getBackendName()),
        rank_(group_->getRank()),
        size_(group_->getSize()),
        scratch_(std::make_shared<Scratch>()) {}
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
  void barrier() override {
    if (members_.empty()) {
      group()->barrier()->wait();
    } else {
      all_reduce(at::zeros({1}), ReduceOp::kSum)->wait();
    }
  }
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
  WorkPtr start_all_reduce(const at::Tensor& tensor, ReduceOp op, Tag tag) override {
    if (!members_.empty()) return reduce_directly(tensor, op, tag);
    std::vector<at::Tensor> wire{wire_tensor(tensor)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d_op(op);
    return copying_back(group()->allreduce(wire, options), wire[0], tensor);
  }

  WorkPtr start_broadcast(const at::Tensor& tensor, int root, Tag) override {
    if (!members_.empty()) return send_to_all(tensor, root);
    std::vector<at::Tensor> wire{wire_tensor(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return copying_back(group()->broadcast(wire, options), wire[0], tensor);
  }

  WorkPtr start_reduce_scatter(const at::Tensor& input, const at::Tensor& output, Tag tag) override {
    if (native(input)) {
      at::Tensor result =
          output.scalar_type() == input.scalar_type() ? output : at::empty_like(output, input.options());
      at::Tensor source = input;
      return copying_back(group()->_reduce_scatter_base(result, source), result, output);
    }
    if (!input.device().is_cpu()) {
      const at::Tensor host = input.to(at::kCPU);
      const at::Tensor result = at::empty(output.sizes(), output.options().device(at::kCPU));
      return then(start_reduce_scatter(host, result, tag), [=] { output.copy_(result); });
    }
    return exchange_and_sum(input, output);
  }

  WorkPtr start_all_gather(const at::Tensor& mine, const at::Tensor& all, Tag tag) override {
    if (native(all)) {
      at::Tensor target = all, source = mine;
      return std::make_shared<C10dWork>(std::vector<Handle>{group()->_allgather_base(target, source)}, nullptr);
    }
    if (!all.device().is_cpu()) {
      const at::Tensor host = at::empty(all.sizes(), all.options().device(at::kCPU));
      return then(start_all_gather(mine.to(at::kCPU), host, tag), [=] { all.copy_(host); });
    }
    return exchange(mine, all);
  }

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const {
    if (!group_)
      fail(
          ErrorKind::kRuntime,
          "this process has left its process group, as it does when it ends, or when nobody holds the engine any more");
    return group_;
  }

  // gloo has no reduce-scatter or all-gather of one tensor on torch 1.13, and slow ones on 2.11 (1.5 to 2 times an
  // all-reduce). Sending each rank its row directly moves the least data, overlaps all peers, needs no arithmetic of
  // the backend, so that every dtype works, and leaves the order of the sum to us.
  bool native(const at::Tensor& tensor) const {
    return members_.empty() && !tensor.device().is_cpu() && name_.find("gloo") == std::string::npos;
  }

  int peer(int r) const { return members_.empty() ? r : members_[r]; }

  WorkPtr send_to_all(const at::Tensor& tensor, int root) {
    const int tag = next_tag();
    std::vector<Handle> handles;
    std::vector<at::Tensor> sent{tensor};
    if (tensor.numel() == 0) return std::make_shared<C10dWork>(std::move(handles), nullptr);
    if (rank() != root) {
      handles.push_back(group()->recv(sent, peer(root), tag));
    } else {
      for (int r = 0; r < size(); ++r)
        if (r != root) handles.push_back(group()->send(sent, peer(r), tag));
    }
    return std::make_shared<C10dWork>(std::move(handles), nullptr);
  }

  // Every element is reduced by one rank, or by all in the same order: the same bits for everybody.
  WorkPtr reduce_directly(const at::Tensor& tensor, ReduceOp op, Tag tag) {
    const at::Tensor flat = tensor.view({-1});
    if (op != ReduceOp::kSum || flat.nbytes() <= kSmallBytes || flat.numel() % size() != 0) {
      const at::Tensor rows = at::empty({size(), flat.numel()}, flat.options());
      return then(start_all_gather(flat, rows, tag), [=, n = size()] {
        at::Tensor result = rows.select(0, 0);
        for (int r = 1; r < n; ++r) {
          const at::Tensor other = rows.select(0, r);
          result = op == ReduceOp::kSum   ? result + other
                   : op == ReduceOp::kMax ? at::maximum(result, other)
                                          : at::minimum(result, other);
        }
        flat.copy_(result);
      });
    }
    const at::Tensor row = flat.view({size(), -1}).select(0, rank());
    start_reduce_scatter(flat, row, tag)->wait();
    return start_all_gather(row, flat, tag);
  }

  WorkPtr exchange_and_sum(const at::Tensor& input, const at::Tensor& output) {
    const int n = size(), me = rank(), tag = next_tag();
    const at::Tensor rows = input.view({n, -1});
    const int64_t row = rows.size(1);
    const at::Tensor received = scratch_->take((n - 1) * row, input.scalar_type()).view({n - 1, row});
    std::vector<Handle> handles;
    if (row > 0) {
      for (int step = 1; step < n; ++step) {
        const int to = (me + step) % n, from = (me + n - step) % n;
        std::vector<at::Tensor> receive{received.select(0, from - (from > me))}, send{rows.select(0, to)};
        handles.push_back(group()->recv(receive, peer(from), tag));
        handles.push_back(group()->send(send, peer(to), tag));
      }
    }
    const auto scratch = scratch_;
    return std::make_shared<C10dWork>(std::move(handles), [=] {
      sum_in_rank_order(received, rows.select(0, me), me, output);
      scratch->give(received.view({-1}));
    });
  }

  static void sum_in_rank_order(const at::Tensor& received, const at::Tensor& own, int me, const at::Tensor& output) {
    const auto part = [&](int64_t r) { return r == me ? own : received.select(0, r - (r > me)); };
    const int64_t n = received.size(0) + 1;
    const bool narrow = own.scalar_type() == at::kHalf || own.scalar_type() == at::kBFloat16;
    at::Tensor sum = output.view({-1});
    if (narrow && sum.scalar_type() != at::kFloat) {
      sum = at::empty(sum.sizes(), sum.options().dtype(at::kFloat));
    } else if (sum.data_ptr() == own.data_ptr() && me > 1) {
      sum = received.select(0, 0);  // our own row must last until its turn
    }
    if (sum.scalar_type() == own.scalar_type()) {
      at::add_out(sum, part(0), part(1));
    } else {
      sum.copy_(part(0));
      sum.add_(part(1));
    }
    for (int64_t r = 2; r < n; ++r) sum.add_(part(r));
    if (sum.data_ptr() != output.data_ptr()) output.copy_(sum.view(output.sizes()));
  }

  WorkPtr exchange(const at::Tensor& mine, const at::Tensor& all) {
    const int n = size(), me = rank(), tag = next_tag();
    const at::Tensor rows = all.view({n, -1});
    if (rows.select(0, me).data_ptr() != mine.data_ptr()) rows.select(0, me).copy_(mine.view({-1}));
    std::vector<Handle> handles;
    if (mine.numel() > 0) {
      for (int step = 1; step < n; ++step) {
        const int to = (me + step) % n, from = (me + n - step) % n;
        std::vector<at::Tensor> receive{rows.select(0, from)}, send{rows.select(0, me)};
        handles.push_back(group()->recv(receive, peer(from), tag));
        handles.push_back(group()->send(send, peer(to), tag));
      }
    }
    return std::make_shared<C10dWork>(std::move(handles), nullptr);
  }

  // Above what scripts use for messages of their own.
  int next_tag() { return first_tag_ + (sequence_++ & 0xffffff); }

  static WorkPtr copying_back(Handle handle, at::Tensor wire, at::Tensor target) {
    std::function<void()> finish;
    if (!wire.is_same(target)) finish = [=] { target.copy_(wire); };
    return std::make_shared<C10dWork>(std::vector<Handle>{std::move(handle)}, std::move(finish));
  }

  static WorkPtr then(WorkPtr first, std::function<void()> finish) {
    return std::make_shared<C10dWork>(std::vector<Handle>{}, [first = std::move(first), finish = std::move(finish)] {
      first->wait();
      finish();
    });
  }

  at::Tensor wire_tensor(const at::Tensor& tensor) const {
    if (tensor.device().is_cpu()) {
      if (tensor.scalar_type() == at::kBool) return tensor.to(at::kByte);
      if (tensor.scalar_type() == at::kBFloat16 && !compat::gloo_carries_bf16()) return tensor.to(at::kFloat);
    }
    return tensor;
  }

  static constexpr size_t kSmallBytes = 64 * 1024;
  int first_tag_ = 1 << 28;
  std::vector<int> members_;  // ranks of the group; empty: all
  BlockingRegion blocking_region_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const OwningProcess owner_;
  std::string name_;
  int rank_, size_;
  std::shared_ptr<Scratch> scratch_;
  int sequence_ = 0;
};

}  // namespace

CommunicatorPtr c10d_communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, BlockingRegion blocking_region) {
  return std::make_shared<C10dCommunicator>(std::move(group), std::move(blocking_region));
}

}  // namespace ds::comm

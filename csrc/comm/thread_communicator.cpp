#include "comm/thread_communicator.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>

#include "base/error.h"

namespace ds::comm {

namespace {

// Regions of all ranks; ranks that wait sleep until a version changes.
struct SharedRegions {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<at::Tensor> regions;
  std::vector<int64_t> versions;
  bool closed = false;
};

// One collective at a time: ranks post what they want to do, the last to come does it for all, all leave.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size), tensors_(size), outputs_(size), calls_(size) {}

  void meet(int rank, const std::string& call, const at::Tensor& tensor, const at::Tensor& output, int root,
            ReduceOp op) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return broken_ || !leaving_; });
    if (broken_) fail_broken();
    tensors_[rank] = tensor;
    outputs_[rank] = output;
    calls_[rank] = call;
    const int64_t round = round_;
    if (++present_ == size_) {
      error_.clear();
      for (int other = 1; other < size_; ++other)
        if (calls_[other] != calls_[0])
          error_ = "collectives differ: rank 0 called " + calls_[0] + ", rank " + std::to_string(other) + " called " +
                   calls_[other];
      if (error_.empty()) run(call, root, op);
      leaving_ = true;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return broken_ || (leaving_ && round_ == round); });
      if (broken_ && !leaving_) fail_broken();
    }
    const std::string error = error_;
    if (--present_ == 0) {
      leaving_ = false;
      ++round_;
      changed_.notify_all();
    }
    lock.unlock();
    if (!error.empty()) fail(ErrorKind::kRuntime, error);
  }

  std::shared_ptr<SharedRegions> shared_regions(int rank, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!regions_) {
      regions_ = std::make_shared<SharedRegions>();
      regions_->regions.resize(size_);
      regions_->versions.assign(size_, 0);
    }
    regions_->regions[rank] = at::zeros({bytes}, at::TensorOptions().dtype(at::kByte));
    return regions_;
  }
  void forget_regions() {
    std::lock_guard<std::mutex> lock(mutex_);
    regions_.reset();
  }

  std::shared_ptr<Meeting> among(const std::vector<int>& ranks) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& made = subsets_[ranks];
    if (!made) made = std::make_shared<Meeting>(static_cast<int>(ranks.size()));
    return made;
  }

  void leave_for_good() {
    std::lock_guard<std::mutex> lock(mutex_);
    broken_ = true;
    changed_.notify_all();
  }

 private:
  [[noreturn]] void fail_broken() { fail(ErrorKind::kRuntime, "another rank has left the group"); }

  // 16-bit sums are formed in fp32 and rounded once, in rank order: the same bits every time.
  static void sum_rows(const std::vector<at::Tensor>& inputs, int row, const at::Tensor& output) {
    const auto size = static_cast<int64_t>(inputs.size());
    const bool narrow = inputs[0].scalar_type() == at::kBFloat16 || inputs[0].scalar_type() == at::kHalf;
    at::Tensor sum;
    for (const at::Tensor& input : inputs) {
      const at::Tensor part = input.view({size, -1}).select(0, row);
      if (!sum.defined()) {
        sum = narrow ? part.to(at::kFloat) : part.clone();
      } else {
        sum.add_(narrow ? part.to(at::kFloat) : part);
      }
    }
    output.copy_(sum.reshape(output.sizes()));
  }

  void run(const std::string& call, int root, ReduceOp op) {
    if (call == "barrier") return;
    if (call.rfind("broadcast", 0) == 0) {
      for (int rank = 0; rank < size_; ++rank)
        if (rank != root) tensors_[rank].copy_(tensors_[root]);
      return;
    }
    if (call.rfind("all_gather", 0) == 0) {
      for (int rank = 0; rank < size_; ++rank) {
        const at::Tensor rows = outputs_[rank].view({size_, -1});
        for (int from = 0; from < size_; ++from)
          if (rows.select(0, from).data_ptr() != tensors_[from].data_ptr())
            rows.select(0, from).copy_(tensors_[from].reshape({-1}));
      }
      return;
    }
    if (call.rfind("reduce_scatter", 0) == 0) {
      for (int rank = 0; rank < size_; ++rank) sum_rows(tensors_, rank, outputs_[rank]);
      return;
    }
    // 16-bit sums are formed in fp32 and rounded once, in rank order: the same bits for everybody, every time.
    const auto dtype = tensors_[0].scalar_type();
    const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
    at::Tensor result = narrow ? tensors_[0].to(at::kFloat) : tensors_[0].clone();
    for (int rank = 1; rank < size_; ++rank) {
      const at::Tensor other = narrow ? tensors_[rank].to(at::kFloat) : tensors_[rank];
      if (op == ReduceOp::kSum) result.add_(other);
      if (op == ReduceOp::kMax) result = at::maximum(result, other);
      if (op == ReduceOp::kMin) result = at::minimum(result, other);
    }
    for (int rank = 0; rank < size_; ++rank) tensors_[rank].copy_(result);
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<at::Tensor> tensors_, outputs_;
  std::vector<std::string> calls_;
  std::string error_;
  int present_ = 0;
  int64_t round_ = 0;
  std::map<std::vector<int>, std::shared_ptr<Meeting>> subsets_;
  std::shared_ptr<SharedRegions> regions_;  // while peer_memory() collects them
  bool leaving_ = false;
  bool broken_ = false;
};

class ThreadPeerMemory : public PeerMemory {
 public:
  ThreadPeerMemory(std::shared_ptr<SharedRegions> shared, int rank) : shared_(std::move(shared)), rank_(rank) {}
  ~ThreadPeerMemory() override {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->closed = true;
    shared_->changed.notify_all();
  }
  at::Tensor region(int rank) override {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    return shared_->regions[rank];
  }
  void publish() override {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    ++shared_->versions[rank_];
    shared_->changed.notify_all();
  }
  void await(int64_t version) override {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    const auto ready = [&] {
      for (int64_t theirs : shared_->versions)
        if (theirs < version) return false;
      return true;
    };
    shared_->changed.wait(lock, [&] { return ready() || shared_->closed; });
    if (!ready()) fail(ErrorKind::kRuntime, "another rank has left the group");
  }

 private:
  std::shared_ptr<SharedRegions> shared_;
  int rank_;
};

class DoneWork : public Work {
 public:
  void wait() override {}
  bool ready() override { return true; }
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Meeting> meeting, int rank, int size, bool peer_memory)
      : meeting_(std::move(meeting)), rank_(rank), size_(size), peer_memory_(peer_memory) {}
  ~ThreadCommunicator() override { meeting_->leave_for_good(); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return "threads"; }

  void barrier() override { meeting_->meet(rank_, "barrier", {}, {}, 0, ReduceOp::kSum); }
  PeerMemoryPtr peer_memory(int64_t bytes) override {
    if (!peer_memory_) return nullptr;
    const auto shared = meeting_->shared_regions(rank_, bytes);
    barrier();
    if (rank_ == 0) meeting_->forget_regions();
    barrier();
    return std::make_shared<ThreadPeerMemory>(shared, rank_);
  }
  CommunicatorPtr among(const std::vector<int>& ranks) override {
    const auto mine = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
    return std::make_shared<ThreadCommunicator>(meeting_->among(ranks), static_cast<int>(mine),
                                                static_cast<int>(ranks.size()), false);
  }

 protected:
  WorkPtr start_all_reduce(const at::Tensor& tensor, ReduceOp op, Tag tag) override {
    return meet("all_reduce(" + describe(tensor) + ", op " + std::to_string(static_cast<int>(op)) + ")" + tag, tensor,
                {}, 0, op);
  }
  WorkPtr start_broadcast(const at::Tensor& tensor, int root, Tag tag) override {
    return meet("broadcast(" + describe(tensor) + ", root " + std::to_string(root) + ")" + tag, tensor, {}, root,
                ReduceOp::kSum);
  }
  WorkPtr start_reduce_scatter(const at::Tensor& input, const at::Tensor& output, Tag tag) override {
    return meet("reduce_scatter(" + describe(input) + ")" + tag, input, output, 0, ReduceOp::kSum);
  }
  WorkPtr start_all_gather(const at::Tensor& mine, const at::Tensor& all, Tag tag) override {
    return meet("all_gather(" + describe(mine) + ")" + tag, mine, all, 0, ReduceOp::kSum);
  }

 private:
  WorkPtr meet(const std::string& call, const at::Tensor& tensor, const at::Tensor& output, int root, ReduceOp op) {
    meeting_->meet(rank_, call, tensor, output, root, op);
    return std::make_shared<DoneWork>();
  }
  static std::string describe(const at::Tensor& tensor) {
    return std::to_string(tensor.numel()) + " x " + c10::toString(tensor.scalar_type());
  }

  std::shared_ptr<Meeting> meeting_;
  int rank_, size_;
  bool peer_memory_;
};

}  // namespace

std::vector<CommunicatorPtr> thread_communicators(int size, bool peer_memory) {
  auto meeting = std::make_shared<Meeting>(size);
  std::vector<CommunicatorPtr> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.push_back(std::make_shared<ThreadCommunicator>(meeting, rank, size, peer_memory));
  return ranks;
}

}  // namespace ds::comm

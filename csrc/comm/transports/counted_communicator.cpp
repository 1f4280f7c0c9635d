#include "comm/transports/counted_communicator.h"

#include <ATen/Functions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/error.h"
#include "comm/calls/compose.h"
#include "comm/shared_memory/shm_group.h"
#include "comm/calls/strided_parts.h"

namespace ds::comm {
namespace {

// Work on a stream: the host goes on, and the time of the stream that computes goes on in wait().
class CountedWork : public Work {
 public:
  CountedWork(std::shared_ptr<plan::StepPlan> step, int64_t call) : step_(std::move(step)), call_(call) {}
  void wait() override {
    if (step_) step_->wait(call_);
  }
  bool ready() override { return true; }
  bool ended() override { return false; }

 private:
  const std::shared_ptr<plan::StepPlan> step_;  // null: calls take no time
  const int64_t call_;
};

class CountedCommunicator : public Communicator {
 public:
  CountedCommunicator(int rank, int size, std::string group, CountedTime time, PlannedPeers peers)
      : rank_(rank), size_(size), group_(std::move(group)), time_(std::move(time)), peers_(std::move(peers)) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return "counted"; }
  bool carries(const Op& op) const override { return op.peer != kAnyRank; }
  // As NCCL does; ranks that compute on the CPU have no such communicator.
  bool groups() const override { return time_.touched == nullptr && !(time_.step && time_.step->synchronous()); }
  PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }
  std::shared_ptr<Communicator> among(const std::vector<int>& ranks) override {
    const auto mine = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
    return counted_communicator(mine, static_cast<int>(ranks.size()), group_, time_);
  }

 protected:
  bool carries_parts() const override { return time_.touched != nullptr; }
  WorkPtr start(const Op& op) override {
    if (peers_ && is_message(op.verb)) return pass_on(op);
    if (op.out.defined() && !op.out.is_meta()) {
      // A mode of Python takes far longer than the copy.
      const c10::impl::ExcludeDispatchKeyGuard unseen(c10::python_ks);
      op.visit_each([this](const Op& one) { fill(one); });
    }
    if (op.parts) touch(op.parts->give_counts(), static_cast<int64_t>(op.parts->some().element_size()));
    if (size_ == 1 || op.verb == Verb::kBarrier) return std::make_shared<DoneWork>();
    if (!time_.step) return std::make_shared<CountedWork>(nullptr, 0);
    int64_t bytes = 0;
    op.visit_each([&](const Op& one) {
      const at::Tensor& some = one.own().defined() ? one.own() : one.whole();
      bytes += moved(one) * static_cast<int64_t>(some.element_size());
    });
    const int64_t takes = time_.link.time_of(bytes, size_);
    if (op.own().is_cpu() && !time_.touched) {  // hosts wait for each other, beside their devices
      time_.step->exchange(takes);
      return std::make_shared<CountedWork>(nullptr, 0);
    }
    return std::make_shared<CountedWork>(time_.step, time_.step->start(group_, takes, described(op)));
  }

 private:
  static std::string described(const Op& op) {
    const std::string verb = verb_name(op.verb);
    return op.tag.empty() ? verb : verb + " of " + op.tag;
  }

  void touch(std::vector<int64_t> counts, int64_t width) const {
    counts[static_cast<size_t>(rank_)] = 0;
    time_.touched(ShmGroup::exchange_memory(size_, width * *std::max_element(counts.begin(), counts.end())));
  }

  WorkPtr pass_on(const Op& op) {
    const bool sends = op.verb == Verb::kSend;
    const at::Tensor& tensor = sends ? op.in : op.out;
    if (!tensor.is_cpu()) return std::make_shared<DoneWork>();
    const std::string edge = sends ? c10::str(rank_, " to ", op.peer) : c10::str(op.peer, " to ", rank_);
    const std::string key = c10::str(edge, ", message ", messages_[edge]++);
    auto* const bytes = static_cast<uint8_t*>(tensor.data_ptr());
    if (sends) {
      peers_->set(key, std::vector<uint8_t>(bytes, bytes + tensor.nbytes()));
    } else {
      const std::vector<uint8_t> sent = peers_->get(key);
      if (sent.size() != tensor.nbytes())
        fail(ErrorKind::kRuntime, "planned rank ", op.peer, " has sent ", sent.size(), " bytes, and rank ", rank_,
             " receives ", tensor.nbytes());
      std::memcpy(bytes, sent.data(), sent.size());
    }
    return std::make_shared<DoneWork>();
  }

  // The elements that this rank sends or receives, whichever are more.
  int64_t moved(const Op& op) const {
    if (op.verb == Verb::kRecv) return op.out.numel();
    const int64_t sent = op.sent(rank_, size_);
    return op.verb == Verb::kAllToAll ? std::max(sent, op.out.numel() * (size_ - 1) / size_) : sent;
  }

  void fill(const Op& op) const {
    switch (op.verb) {
      case Verb::kAllReduce: return repeat(op.out, op.reduce);
      case Verb::kReduce:
        if (op.peer == rank_) repeat(op.out, op.reduce);
        return;
      case Verb::kReduceScatter:
        op.out.view({-1}).copy_(parts_of(op.in, op.in_counts, size_)[static_cast<size_t>(rank_)]);
        return repeat(op.out, op.reduce);
      case Verb::kAllGather:
      case Verb::kGather:
        if (op.out_counts.empty() && op.out.numel() == op.in.numel() * size_) {
          // The input may be a part of the output.
          op.out.view({size_, op.in.numel()}).copy_(op.in.reshape({1, op.in.numel()}).clone());
          return;
        }
        for (const at::Tensor& part : parts_of(op.out, op.out_counts, size_)) copy(part, op.in);
        return;
      case Verb::kAllToAll:
        if (op.parts) return;
        for (const at::Tensor& part : parts_of(op.out, op.out_counts, size_))
          copy(part, parts_of(op.in, op.in_counts, size_)[static_cast<size_t>(rank_)]);
        return;
      case Verb::kScatter:
        if (op.in.defined()) copy(op.out, parts_of(op.in, op.in_counts, size_)[static_cast<size_t>(rank_)]);
        return;
      case Verb::kRecv: op.out.zero_(); return;
      case Verb::kBroadcast:
      case Verb::kSend:
      case Verb::kBarrier: return;
    }
  }

  void repeat(const at::Tensor& values, ReduceOp reduce) const {
    if (reduce == ReduceOp::kSum) values.mul_(size_);
    if (reduce == ReduceOp::kProduct) values.pow_(size_);
    if (reduce == ReduceOp::kXor && size_ % 2 == 0) values.zero_();
  }

  // As much as both have: other ranks may have other numbers of elements.
  static void copy(const at::Tensor& to, const at::Tensor& from) {
    const int64_t count = std::min(to.numel(), from.numel());
    to.view({-1}).narrow(0, 0, count).copy_(from.view({-1}).narrow(0, 0, count));
  }

  const int rank_, size_;
  const std::string group_;
  const CountedTime time_;
  const PlannedPeers peers_;
  std::map<std::string, int64_t> messages_;  // by their two ranks
};

}  // namespace

CommunicatorPtr counted_communicator(int rank, int size, std::string group, CountedTime time, PlannedPeers peers) {
  if (rank < 0 || rank >= size) fail(ErrorKind::kValue, "rank ", rank, " is none of ", size, " ranks");
  return std::make_shared<CountedCommunicator>(rank, size, std::move(group), std::move(time), std::move(peers));
}

}  // namespace ds::comm

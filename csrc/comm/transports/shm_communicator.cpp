#include "comm/transports/shm_communicator.h"

#include <cstdlib>
#include <string>

#include "base/clock.h"
#include "comm/shared_memory/process_peer_memory.h"
#include "comm/shared_memory/shm_work.h"
#include "comm/transports/hierarchical_communicator.h"

namespace ds::comm {

namespace {

class ShmCommunicator : public Communicator {
 public:
  ShmCommunicator(CommunicatorPtr inner, std::unique_ptr<ShmGroup> group, bool background)
      : inner_(std::move(inner)), queue_(std::make_shared<ShmQueue>(std::move(group), background)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return "shm"; }
  bool carries(const Op& op) const override {
    if (by_inner(op)) return true;
    switch (op.verb) {
      case Verb::kAllToAll:
      case Verb::kBarrier: return true;
      case Verb::kAllReduce:
      case Verb::kReduce:
      case Verb::kBroadcast:
      case Verb::kReduceScatter:
      case Verb::kAllGather:
      case Verb::kGather:
      case Verb::kScatter: return op.in_counts.empty() && op.out_counts.empty();
      default: return false;
    }
  }
  WorkPtr run_all(const std::vector<Op>& ops) override {
    queue_->progress();
    return inner_->run_all(ops);
  }
  PeerMemoryPtr peer_memory(int64_t bytes) override {
    return process_peer_memory(*this, bytes, [queue = queue_](int rank, Clock::time_point since) {
      queue->group().channel().look_after(rank, since, "the values of its parameters");
    });
  }
  void leave() override { inner_->leave(); }
  void set_timeout(milliseconds timeout) override { queue_->group().channel().set_timeout(timeout); }
  void abort(const std::string& why) noexcept override {
    queue_->group().channel().stop(why);
    inner_->abort(why);
  }

 protected:
  bool carries_parts() const override { return true; }
  WorkPtr start(const Op& op) override {
    if (by_inner(op)) {
      if (op.wait == Wait::kLater) queue_->progress();  // calls of scripts move on by themselves
      return inner_->run(op);
    }
    return std::make_shared<ShmWork>(queue_, queue_->submit([op](ShmGroup& group) { call(group, op); }, begin(op)));
  }

 private:
  ShmQueue::Start begin(const Op& op) const {
    if (op.wait == Wait::kDetached) return ShmQueue::Start::kPerhapsLater;
    const bool soon = queue_->background() && op.wait == Wait::kLater && op.verb != Verb::kBarrier;
    return soon ? ShmQueue::Start::kSoon : ShmQueue::Start::kByWaiting;
  }

  static bool by_inner(const Op& op) {
    return is_message(op.verb) || (op.verb != Verb::kBarrier && !op.own().device().is_cpu());
  }

  static void call(ShmGroup& group, const Op& op) {
    if (op.verb == Verb::kBarrier) return group.barrier();
    const at::Tensor& own = op.own();
    const size_t n = numel(own);
    const at::ScalarType type = op.in.defined() ? op.in.scalar_type() : own.scalar_type();
    const bool root = op.peer == group.rank();
    switch (op.verb) {
      case Verb::kAllReduce: return group.all_reduce(op.out.data_ptr(), n, type, op.reduce, op.tag);
      case Verb::kReduce: return group.reduce(op.out.data_ptr(), n, type, op.reduce, op.peer, op.tag);
      case Verb::kBroadcast: return group.broadcast(op.out.data_ptr(), n, type, op.peer, op.tag);
      case Verb::kReduceScatter:
        return group.reduce_scatter(op.out.data_ptr(), rows(op.in, group.size()), n, type, op.reduce,
                                    type != op.out.scalar_type(), op.tag);
      case Verb::kAllGather: return group.all_gather(rows(op.out, group.size()), op.in.data_ptr(), n, type, op.tag);
      case Verb::kGather:
        return group.gather(root ? rows(op.out, group.size()) : Rows(), op.in.data_ptr(), n, type, op.peer, op.tag);
      case Verb::kScatter:
        return group.scatter(op.out.data_ptr(), root ? rows(op.in, group.size()) : Rows(), n, own.scalar_type(),
                             op.peer, op.tag);
      default: break;
    }
    if (op.parts) return group.all_to_all(*op.parts, type, op.tag);
    const auto counts = [&](const at::Tensor& whole, const std::vector<int64_t>& given) {
      return given.empty() ? std::vector<int64_t>(group.size(), whole.numel() / group.size()) : given;
    };
    const auto take = counts(op.out, op.out_counts), give = counts(op.in, op.in_counts);
    group.all_to_all(rows_at(op.out.data_ptr(), take, op.out.element_size()), take,
                     rows_at(op.in.data_ptr(), give, op.in.element_size()), give, type, op.tag);
  }

  static size_t numel(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()); }
  static Rows rows(const at::Tensor& all, int count) {
    return rows_of(all.data_ptr(), count, all.nbytes() / static_cast<size_t>(count));
  }

  CommunicatorPtr inner_;
  std::shared_ptr<ShmQueue> queue_;
};

}  // namespace

namespace {

bool unwanted(const Communicator& inner) {
  const char* wish = std::getenv("DS_SHM_COLLECTIVES");
  return inner.size() == 1 || (wish && std::string(wish) == "0");
}

CommunicatorPtr in_shared_memory(CommunicatorPtr inner, milliseconds timeout, const GroupFacts& facts) {
  auto group = ShmGroup::create(inner->rank(), inner->size(), rendezvous_over(inner->bare()), timeout, facts);
  if (!group) return inner;
  const bool background = facts.spare_cores.value_or(has_spare_cores(inner->size()));
  return std::make_shared<ShmCommunicator>(std::move(inner), std::move(group), background);
}

}  // namespace

CommunicatorPtr shm_communicator(CommunicatorPtr inner, milliseconds timeout, const GroupFacts& facts) {
  if (unwanted(*inner)) return inner;
  if (auto made = hierarchical_communicator(inner, timeout, facts, host_id())) return made;
  return in_shared_memory(std::move(inner), timeout, facts);
}

CommunicatorPtr one_host_communicator(CommunicatorPtr inner, milliseconds timeout, const GroupFacts& facts) {
  if (unwanted(*inner)) return inner;
  const std::vector<int64_t> hosts = hosts_of_all(inner->bare(), host_id());
  for (const int64_t host : hosts)
    if (host != hosts[0]) return inner;
  return in_shared_memory(std::move(inner), timeout, facts);
}

CommunicatorPtr exchanges_by_hosts(CommunicatorPtr inner, milliseconds timeout, const GroupFacts& facts) {
  if (unwanted(*inner)) return inner;
  const auto made = hierarchical_communicator(inner, timeout, facts, host_id(), ByHosts::kExchanges);
  return made ? made : inner;
}

}  // namespace ds::comm

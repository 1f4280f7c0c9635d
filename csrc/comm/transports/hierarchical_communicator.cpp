#include "comm/transports/hierarchical_communicator.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "comm/hosts/host_exchange.h"
#include "comm/hosts/hosts.h"
#include "comm/shared_memory/process_peer_memory.h"
#include "comm/shared_memory/shm_work.h"

namespace ds::comm {

namespace {

// The state of a group, shared with its collectives that are under way.
struct Tree {
  Hosts hosts;
  CommunicatorPtr leaders;  // null: this rank is not a leader
  mutable WorkPtr told;     // the message about a failure of this host to the other leaders; kept until it is sent

  // Runs `talk` on the leader; its error ends the call on all ranks of this host.
  template <typename Talk>
  void between_hosts(ShmGroup& group, const Talk& talk) const {
    if (!leaders) return;
    try {
      talk(*leaders);
    } catch (const std::exception& error) {
      group.channel().give_up("the leader of this host could not finish with those of the other hosts: " +
                              std::string(error.what()));
    }
  }
};

// Leaders compare the calls of their hosts, with some numbers, after the ranks of each host have agreed on the call. A
// leader whose ranks have failed sends that instead, so that the other hosts do not wait for them.
class FingerprintExchange {
 public:
  FingerprintExchange(const Tree& tree, const Record& call, size_t numbers = 0)
      : tree_(tree), call_(call), numbers_(numbers) {}

  // Fails if hosts make different calls, or if one of them has failed.
  void compare(ShmGroup& group, const std::vector<int64_t>& numbers = {}) {
    tree_.between_hosts(group, [&](Communicator& leaders) {
      begin(call_, numbers);
      work_->wait();
      std::vector<Record> calls(leaders.size());
      for (int host = 0; host < leaders.size(); ++host)
        std::memcpy(static_cast<void*>(&calls[host]), all_.select(0, host).data_ptr(), sizeof(Record));
      for (int host = 0; host < leaders.size(); ++host)
        if (std::string(calls[host].what) == kFailed)
          fail(ErrorKind::kRuntime, "the ranks on the host of rank ", tree_.hosts.ranks[host][0],
               " have failed: ", static_cast<const char*>(all_.select(0, host).data_ptr()) + text_begins());
      for (const Record& other : calls) {
        if (fits(other, calls[0])) continue;
        std::string text = "the hosts call different collectives:";
        for (int host = 0; host < leaders.size(); ++host)
          text += " that of rank " + std::to_string(tree_.hosts.ranks[host][0]) + " " + describe(calls[host]) + ";";
        fail(ErrorKind::kRuntime, text);
      }
    });
  }
  // Tells the other hosts that this one has failed in the call. Does not wait: hosts that come later get it then.
  void tell_failure(const std::string& why) noexcept {
    if (!tree_.leaders || work_) return;
    try {
      why_ = why.substr(0, why.find('\n'));
      begin(record(kFailed), {});
      tree_.told = work_;
    } catch (const std::exception&) {  // the leaders cannot be reached
      return;
    }
  }
  // Once compared: those of all hosts. A leader's.
  std::vector<std::vector<int64_t>> numbers() const {
    std::vector<std::vector<int64_t>> all;
    for (int64_t host = 0; host < all_.size(0); ++host) {
      all.emplace_back(numbers_);
      std::memcpy(all.back().data(), static_cast<const char*>(all_.select(0, host).data_ptr()) + sizeof(Record),
                  numbers_ * sizeof(int64_t));
    }
    return all;
  }

 private:
  static constexpr const char* kFailed = "failed";
  static constexpr size_t kMostText = 512;  // of the reason, with the zero at its end

  void begin(const Record& call, const std::vector<int64_t>& numbers) {
    const auto bytes = static_cast<int64_t>(text_begins() + kMostText);
    all_ = at::zeros({tree_.leaders->size(), bytes}, at::TensorOptions().dtype(at::kByte));
    const at::Tensor mine = all_.select(0, tree_.leaders->rank());
    std::memcpy(mine.data_ptr(), static_cast<const void*>(&call), sizeof(call));
    if (!numbers.empty())
      std::memcpy(static_cast<char*>(mine.data_ptr()) + sizeof(Record), numbers.data(),
                  numbers.size() * sizeof(int64_t));
    std::memcpy(static_cast<char*>(mine.data_ptr()) + text_begins(), why_.data(), std::min(why_.size(), kMostText - 1));
    work_ = tree_.leaders->all_gather(mine, all_);
  }
  size_t text_begins() const { return sizeof(Record) + numbers_ * sizeof(int64_t); }

  const Tree& tree_;
  const Record call_;
  const size_t numbers_;
  std::string why_;
  at::Tensor all_;
  WorkPtr work_;
};

size_t count_of(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()); }

bool narrow(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

class HierarchicalCommunicator : public Communicator {
 public:
  HierarchicalCommunicator(CommunicatorPtr inner, std::unique_ptr<ShmGroup> group, bool background, Tree tree,
                           ByHosts what)
      : inner_(std::move(inner)),
        queue_(std::make_shared<ShmQueue>(std::move(group), background)),
        tree_(std::make_shared<Tree>(std::move(tree))),
        memory_(std::make_shared<LeaderMemory>()),
        what_(what) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return what_ == ByHosts::kAll ? "hierarchical" : inner_->name(); }
  bool carries(const Op&) const override { return true; }  // what leaders cannot speed up goes as without them
  WorkPtr run_all(const std::vector<Op>& ops) override {
    queue_->progress();
    return inner_->run_all(ops);
  }
  PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }
  void leave() override {
    if (tree_->leaders) tree_->leaders->leave();
    inner_->leave();
  }
  void abort(const std::string& why) noexcept override {
    queue_->group().channel().stop(why);
    if (tree_->leaders) tree_->leaders->abort(why);
    inner_->abort(why);
  }

 protected:
  bool carries_parts() const override { return true; }
  WorkPtr start(const Op& op) override {
    const bool even = op.in_counts.empty() && op.out_counts.empty();
    if (op.verb == Verb::kAllToAll && op.own().device().is_cpu()) return all_to_all(op);
    const bool all = what_ == ByHosts::kAll;
    if (all && op.verb == Verb::kBarrier) return barriers();
    if (all && op.own().device().is_cpu() && even && op.reduce != ReduceOp::kAvg) {
      if (op.verb == Verb::kAllReduce) return all_reduce(op);
      if (op.verb == Verb::kBroadcast) return broadcast(op);
      if (op.verb == Verb::kReduceScatter) return reduce_scatter(op);
      if (op.verb == Verb::kAllGather) return all_gather(op);
    }
    if (op.wait == Wait::kLater) queue_->progress();
    return inner_->run(op);
  }

 private:
  using Body = std::function<void(ShmGroup&, const Tree&, FingerprintExchange&)>;

  WorkPtr barriers() {
    return submit(record("barrier"), [](ShmGroup& group, const Tree& tree, FingerprintExchange& fingerprints) {
      group.barrier();
      fingerprints.compare(group);
      tree.between_hosts(group, [](Communicator& leaders) { leaders.barrier(); });
      group.barrier();
    });
  }

  WorkPtr all_reduce(const Op& op) {
    return submit(
        record_of(op, rank(), size()), [op](ShmGroup& group, const Tree& tree, FingerprintExchange& fingerprints) {
          const at::Tensor& tensor = op.out;
          const at::Tensor sum = op.reduce == ReduceOp::kSum && narrow(tensor) ? tensor.to(at::kFloat) : tensor;
          group.reduce(sum.data_ptr(), count_of(sum), sum.scalar_type(), op.reduce, 0, op.tag);
          fingerprints.compare(group);
          tree.between_hosts(group, [&](Communicator& leaders) { leaders.all_reduce(sum, op.reduce)->wait(); });
          group.broadcast(sum.data_ptr(), count_of(sum), sum.scalar_type(), 0, op.tag);
          if (!sum.is_same(tensor)) tensor.copy_(sum);
        });
  }

  WorkPtr broadcast(const Op& op) {
    const Record header = record_of(op, rank(), size());
    return submit(header, [op, header](ShmGroup& group, const Tree& tree, FingerprintExchange& fingerprints) {
      const at::Tensor& tensor = op.out;
      const int from = tree.hosts.host_of(op.peer), local = tree.hosts.local_rank_of(op.peer);
      const auto inside = [&](int local_root) {
        group.broadcast(tensor.data_ptr(), count_of(tensor), tensor.scalar_type(), local_root, op.tag);
      };
      from == tree.hosts.mine ? inside(local) : group.agree(header);
      fingerprints.compare(group);
      tree.between_hosts(group, [&](Communicator& leaders) { leaders.broadcast(tensor, from)->wait(); });
      if (from != tree.hosts.mine) inside(0);
    });
  }

  WorkPtr reduce_scatter(const Op& op) {
    return submit(record_of(op, rank(), size()), [op, n = size()](ShmGroup& group, const Tree& tree,
                                                                  FingerprintExchange& fingerprints) {
      const at::Tensor &input = op.in, &output = op.out;
      const at::Tensor sum = narrow(input) ? input.to(at::kFloat) : input;
      group.reduce(sum.data_ptr(), count_of(sum), sum.scalar_type(), op.reduce, 0, op.tag);
      fingerprints.compare(group);
      const at::Tensor rows = sum.view({n, output.numel()});
      at::Tensor mine;  // the rows of this host's ranks
      tree.between_hosts(
          group, [&](Communicator& leaders) { mine = reduced_over_hosts(leaders, tree.hosts, rows, op.reduce); });
      at::Tensor row = sum.scalar_type() == output.scalar_type() ? output : at::empty(output.sizes(), sum.options());
      const size_t bytes = row.nbytes();
      group.scatter(row.data_ptr(), mine.defined() ? rows_of(mine.data_ptr(), group.size(), bytes) : Rows(),
                    count_of(row), row.scalar_type(), 0, op.tag);
      if (!row.is_same(output)) output.copy_(row);
    });
  }

  WorkPtr all_gather(const Op& op) {
    return submit(record_of(op, rank(), size()), [op, n = size()](ShmGroup& group, const Tree& tree,
                                                                  FingerprintExchange& fingerprints) {
      const at::Tensor &mine = op.in, &all = op.out;
      const at::Tensor rows = all.view({n, mine.numel()});
      at::Tensor block;  // the rows of this host's ranks
      if (tree.leaders) block = at::empty({group.size(), mine.numel()}, all.options());
      group.gather(tree.leaders ? rows_of(block.data_ptr(), group.size(), mine.nbytes()) : Rows(), mine.data_ptr(),
                   count_of(mine), mine.scalar_type(), 0, op.tag);
      fingerprints.compare(group);
      tree.between_hosts(group, [&](Communicator& leaders) { gather_blocks(leaders, tree.hosts, block, rows); });
      group.broadcast(all.data_ptr(), count_of(all), all.scalar_type(), 0, op.tag);
    });
  }

  WorkPtr all_to_all(const Op& op) {
    const Record header = record_of(op, rank(), size());
    const size_t numbers = HostExchange::numbers(tree_->hosts);
    const Body body = [op, memory = memory_](ShmGroup& group, const Tree& tree, FingerprintExchange& fingerprints) {
      HostExchange exchange(op, tree.hosts, *memory);
      exchange.collect(group);
      fingerprints.compare(group, exchange.told());
      WorkPtr crossing;
      tree.between_hosts(group, [&](Communicator& leaders) {
        exchange.check(fingerprints.numbers());
        crossing = exchange.cross(leaders);
      });
      exchange.inside(group);
      tree.between_hosts(group, [&](Communicator&) { crossing->wait(); });
      exchange.deliver(group);
    };
    return submit(header, body, op.wait == Wait::kDetached || (queue_->background() && op.wait == Wait::kLater),
                  numbers);
  }

  // Hosts may have different numbers of ranks: leaders send blocks as long as the longest.
  static int64_t most_ranks(const Hosts& hosts) {
    size_t most = 0;
    for (const auto& host : hosts.ranks) most = std::max(most, host.size());
    return static_cast<int64_t>(most);
  }

  static void gather_blocks(Communicator& leaders, const Hosts& hosts, const at::Tensor& block,
                            const at::Tensor& rows) {
    const int64_t numel = rows.size(1);
    const at::Tensor blocks = at::empty({leaders.size(), most_ranks(hosts), numel}, rows.options());
    const at::Tensor mine = blocks.select(0, leaders.rank());
    mine.narrow(0, 0, block.size(0)).copy_(block);
    leaders.all_gather(mine, blocks)->wait();
    for (size_t host = 0; host < hosts.ranks.size(); ++host)
      for (size_t local = 0; local < hosts.ranks[host].size(); ++local)
        rows.select(0, hosts.ranks[host][local])
            .copy_(blocks.select(0, static_cast<int64_t>(host)).select(0, static_cast<int64_t>(local)));
  }

  // rows[r]: what this host has reduced for rank r. Returns what all hosts have for the ranks of this host.
  static at::Tensor reduced_over_hosts(Communicator& leaders, const Hosts& hosts, const at::Tensor& rows, ReduceOp op) {
    const at::Tensor blocks = at::zeros({leaders.size(), most_ranks(hosts), rows.size(1)}, rows.options());
    for (size_t host = 0; host < hosts.ranks.size(); ++host)
      for (size_t local = 0; local < hosts.ranks[host].size(); ++local)
        blocks.select(0, static_cast<int64_t>(host))
            .select(0, static_cast<int64_t>(local))
            .copy_(rows.select(0, hosts.ranks[host][local]));
    const at::Tensor mine = blocks.select(0, leaders.rank());
    leaders.run({Verb::kReduceScatter, blocks, mine, {}, {}, op, -1, {}})->wait();
    return mine;
  }

  WorkPtr submit(const Record& header, Body body) { return submit(header, std::move(body), queue_->background(), 0); }

  // `numbers`: how many each leader tells the others beside its fingerprint.
  WorkPtr submit(const Record& header, Body body, bool soon, size_t numbers) {
    const auto task = queue_->submit(
        [tree = tree_, header, numbers, body = std::move(body)](ShmGroup& group) {
          // The other leaders may stand in what failed here, and take fingerprints for its data.
          group.channel().refuse_if_failed();
          FingerprintExchange fingerprints(*tree, header, numbers);
          try {
            body(group, *tree, fingerprints);
          } catch (const std::exception& error) {
            fingerprints.tell_failure(error.what());
            throw;
          }
        },
        soon ? ShmQueue::Start::kSoon : ShmQueue::Start::kByWaiting);
    return std::make_shared<ShmWork>(queue_, task);
  }

  CommunicatorPtr inner_;
  std::shared_ptr<ShmQueue> queue_;
  std::shared_ptr<Tree> tree_;
  std::shared_ptr<LeaderMemory> memory_;
  const ByHosts what_;
};

}  // namespace

std::vector<int64_t> hosts_of_all(Communicator& inner, int64_t host) {
  const at::Tensor all = at::zeros({inner.size()}, at::kLong);
  all[inner.rank()] = host;
  inner.all_gather(all.narrow(0, inner.rank(), 1), all)->wait();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()};
}

CommunicatorPtr hierarchical_communicator(const CommunicatorPtr& inner, milliseconds timeout, const GroupFacts& facts,
                                          int64_t host, ByHosts what) {
  Tree tree;
  tree.hosts = group_by_host(hosts_of_all(inner->bare(), host), inner->rank());
  const auto& here = tree.hosts.ranks[tree.hosts.mine];
  const auto count = static_cast<int>(tree.hosts.ranks.size());
  if (count == 1 || count == inner->size()) return nullptr;
  if (tree.hosts.leads()) tree.leaders = inner->among(tree.hosts.leaders());
  const Rendezvous everybody = rendezvous_over(inner->bare());
  if (!everybody.all(!tree.hosts.leads() || tree.leaders)) return nullptr;
  Rendezvous rendezvous = everybody;
  rendezvous.exchange = [&](const SegmentFacts& mine) {
    const std::vector<SegmentFacts> all = everybody.exchange(mine);
    std::vector<SegmentFacts> local;
    for (int rank : here) local.push_back(all[rank]);
    return local;
  };
  auto group = ShmGroup::create(tree.hosts.local, static_cast<int>(here.size()), rendezvous, timeout, facts);
  if (!group) return nullptr;
  const bool background = facts.spare_cores.value_or(has_spare_cores(inner->size()));
  return std::make_shared<HierarchicalCommunicator>(inner, std::move(group), background, std::move(tree), what);
}

}  // namespace ds::comm

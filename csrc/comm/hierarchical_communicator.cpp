#include "comm/hierarchical_communicator.h"

#include <ATen/Functions.h>

#include <cstring>

#include "base/error.h"
#include "comm/hosts.h"
#include "comm/process_peer_memory.h"
#include "comm/shm_work.h"

namespace ds::comm {

namespace {

// What the collectives of one group need, shared with those that are under way.
struct Tree {
  Hosts hosts;
  CommunicatorPtr leaders;  // null: this rank leads nobody

  // The ranks of this host stop with what leaders find out.
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

// What a leader calls, told to the other leaders while its host is at work.
class FingerprintExchange {
 public:
  FingerprintExchange(const Tree& tree, const Record& call) : tree_(tree) {
    if (!tree.leaders) return;
    const auto bytes = static_cast<int64_t>(sizeof(Record));
    all_ = at::zeros({tree.leaders->size(), bytes}, at::TensorOptions().dtype(at::kByte));
    const at::Tensor mine = all_.select(0, tree.leaders->rank());
    std::memcpy(mine.data_ptr(), static_cast<const void*>(&call), sizeof(call));
    work_ = tree.leaders->all_gather(mine, all_);
  }
  void compare(ShmGroup& group) {
    tree_.between_hosts(group, [&](Communicator& leaders) {
      work_->wait();
      std::vector<Record> calls(leaders.size());
      for (int host = 0; host < leaders.size(); ++host)
        std::memcpy(static_cast<void*>(&calls[host]), all_.select(0, host).data_ptr(), sizeof(Record));
      for (const Record& other : calls) {
        if (fits(other, calls[0])) continue;
        std::string text = "the hosts call different collectives:";
        for (int host = 0; host < leaders.size(); ++host)
          text += " that of rank " + std::to_string(tree_.hosts.ranks[host][0]) + " " + describe(calls[host]) + ";";
        fail(ErrorKind::kRuntime, text);
      }
    });
  }

 private:
  const Tree& tree_;
  at::Tensor all_;
  WorkPtr work_;
};

size_t elements(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()); }

bool narrow(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

class HierarchicalCommunicator : public Communicator {
 public:
  HierarchicalCommunicator(CommunicatorPtr inner, std::unique_ptr<ShmGroup> group, Tree tree)
      : inner_(std::move(inner)),
        queue_(std::make_shared<ShmQueue>(std::move(group))),
        tree_(std::make_shared<Tree>(std::move(tree))) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return "hierarchical"; }
  void barrier() override {
    start(record("barrier"), [](ShmGroup& group, const Tree& tree, FingerprintExchange& fingerprints) {
      group.barrier();
      fingerprints.compare(group);
      tree.between_hosts(group, [](Communicator& leaders) { leaders.barrier(); });
      group.barrier();
    })->wait();
  }
  PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }
  void leave() override {
    if (tree_->leaders) tree_->leaders->leave();
    inner_->leave();
  }

 protected:
  WorkPtr start_all_reduce(const at::Tensor& tensor, ReduceOp op, Tag tag) override {
    if (!tensor.device().is_cpu()) return inner_->all_reduce(tensor, op, tag);
    return start(call("all_reduce", tensor, tag, static_cast<int>(row_op(op))),
                 [=, tag = std::string(tag)](ShmGroup& group, const Tree& tree, FingerprintExchange& fingerprints) {
                   const at::Tensor sum = op == ReduceOp::kSum && narrow(tensor) ? tensor.to(at::kFloat) : tensor;
                   group.reduce(sum.data_ptr(), elements(sum), sum.scalar_type(), row_op(op), 0, tag);
                   fingerprints.compare(group);
                   tree.between_hosts(group, [&](Communicator& leaders) { leaders.all_reduce(sum, op)->wait(); });
                   group.broadcast(sum.data_ptr(), elements(sum), sum.scalar_type(), 0, tag);
                   if (!sum.is_same(tensor)) tensor.copy_(sum);
                 });
  }

  WorkPtr start_broadcast(const at::Tensor& tensor, int root, Tag tag) override {
    if (!tensor.device().is_cpu()) return inner_->broadcast(tensor, root, tag);
    Record header = call("broadcast", tensor, tag, -1);
    header.root = root;
    return start(header,
                 [=, tag = std::string(tag)](ShmGroup& group, const Tree& tree, FingerprintExchange& fingerprints) {
                   const int from = tree.hosts.host_of(root), place = tree.hosts.place_of(root);
                   const auto inside = [&](int local_root) {
                     group.broadcast(tensor.data_ptr(), elements(tensor), tensor.scalar_type(), local_root, tag);
                   };
                   if (from == tree.hosts.mine) inside(place);
                   fingerprints.compare(group);
                   tree.between_hosts(group, [&](Communicator& leaders) { leaders.broadcast(tensor, from)->wait(); });
                   if (from != tree.hosts.mine) inside(0);
                 });
  }

  WorkPtr start_reduce_scatter(const at::Tensor& input, const at::Tensor& output, Tag tag) override {
    if (!input.device().is_cpu()) return inner_->reduce_scatter(input, output, tag);
    return start(
        call("reduce_scatter", output, tag, static_cast<int>(RowOp::kSum)),
        [=, n = size(), tag = std::string(tag)](ShmGroup& group, const Tree& tree, FingerprintExchange& fingerprints) {
          const at::Tensor sum = narrow(input) ? input.to(at::kFloat) : input;
          group.reduce(sum.data_ptr(), elements(sum), sum.scalar_type(), RowOp::kSum, 0, tag);
          fingerprints.compare(group);
          const at::Tensor rows = sum.view({n, output.numel()});
          at::Tensor mine;  // the rows of this host's ranks
          tree.between_hosts(group, [&](Communicator& leaders) { mine = sum_of_hosts(leaders, tree.hosts, rows); });
          at::Tensor row =
              sum.scalar_type() == output.scalar_type() ? output : at::empty(output.sizes(), sum.options());
          const size_t bytes = row.nbytes();
          group.scatter(row.data_ptr(), mine.defined() ? rows_of(mine.data_ptr(), group.size(), bytes) : Rows(),
                        elements(row), row.scalar_type(), 0, tag);
          if (!row.is_same(output)) output.copy_(row);
        });
  }

  WorkPtr start_all_gather(const at::Tensor& mine, const at::Tensor& all, Tag tag) override {
    if (!all.device().is_cpu()) return inner_->all_gather(mine, all, tag);
    return start(
        call("all_gather", mine, tag, -1),
        [=, n = size(), tag = std::string(tag)](ShmGroup& group, const Tree& tree, FingerprintExchange& fingerprints) {
          const at::Tensor rows = all.view({n, mine.numel()});
          at::Tensor block;  // the rows of this host's ranks
          if (tree.leaders) block = at::empty({group.size(), mine.numel()}, all.options());
          group.gather(tree.leaders ? rows_of(block.data_ptr(), group.size(), mine.nbytes()) : Rows(), mine.data_ptr(),
                       elements(mine), mine.scalar_type(), 0, tag);
          fingerprints.compare(group);
          tree.between_hosts(group, [&](Communicator& leaders) { gather_blocks(leaders, tree.hosts, block, rows); });
          group.broadcast(all.data_ptr(), elements(all), all.scalar_type(), 0, tag);
        });
  }

 private:
  using Body = std::function<void(ShmGroup&, const Tree&, FingerprintExchange&)>;

  static Record call(const char* what, const at::Tensor& tensor, Tag tag, int op) {
    Record made = record(what, tensor.numel(), static_cast<int32_t>(tensor.scalar_type()), tag);
    made.op = op;
    return made;
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
      for (size_t place = 0; place < hosts.ranks[host].size(); ++place)
        rows.select(0, hosts.ranks[host][place])
            .copy_(blocks.select(0, static_cast<int64_t>(host)).select(0, static_cast<int64_t>(place)));
  }

  // rows[r]: this host's sum for rank r. Returns the whole sums for the ranks of this host.
  static at::Tensor sum_of_hosts(Communicator& leaders, const Hosts& hosts, const at::Tensor& rows) {
    const at::Tensor blocks = at::zeros({leaders.size(), most_ranks(hosts), rows.size(1)}, rows.options());
    for (size_t host = 0; host < hosts.ranks.size(); ++host)
      for (size_t place = 0; place < hosts.ranks[host].size(); ++place)
        blocks.select(0, static_cast<int64_t>(host))
            .select(0, static_cast<int64_t>(place))
            .copy_(rows.select(0, hosts.ranks[host][place]));
    const at::Tensor mine = blocks.select(0, leaders.rank());
    leaders.reduce_scatter(blocks, mine)->wait();
    return mine;
  }

  WorkPtr start(const Record& header, Body body) {
    return std::make_shared<ShmWork>(
        queue_, queue_->submit(
                    [tree = tree_, header, body = std::move(body)](ShmGroup& group) {
                      // The other leaders may stand in what failed here, and take fingerprints for its data.
                      group.channel().refuse_if_failed();
                      FingerprintExchange fingerprints(*tree, header);
                      body(group, *tree, fingerprints);
                    },
                    has_spare_cores(inner_->size()) ? ShmQueue::Start::kSoon : ShmQueue::Start::kByWaiting));
  }

  CommunicatorPtr inner_;
  std::shared_ptr<ShmQueue> queue_;
  std::shared_ptr<Tree> tree_;
};

std::vector<int64_t> hosts_of_all(Communicator& inner, int64_t host) {
  const at::Tensor all = at::zeros({inner.size()}, at::kLong);
  all[inner.rank()] = host;
  inner.all_gather(all.narrow(0, inner.rank(), 1), all)->wait();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()};
}

}  // namespace

CommunicatorPtr hierarchical_communicator(const CommunicatorPtr& inner, std::chrono::milliseconds timeout,
                                          const GroupFacts& facts, int64_t host) {
  Tree tree;
  tree.hosts = group_by_host(hosts_of_all(*inner, host), inner->rank());
  const auto& here = tree.hosts.ranks[tree.hosts.mine];
  const auto count = static_cast<int>(tree.hosts.ranks.size());
  if (count == 1 || count == inner->size()) return nullptr;
  if (tree.hosts.leads()) tree.leaders = inner->among(tree.hosts.leaders());
  const Rendezvous everybody = rendezvous_over(*inner);
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
  return std::make_shared<HierarchicalCommunicator>(inner, std::move(group), std::move(tree));
}

}  // namespace ds::comm

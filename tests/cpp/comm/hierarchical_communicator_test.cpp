// Ranks that are threads, on hosts that are told to be different ones.
#include "comm/transports/hierarchical_communicator.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "../error_of.h"
#include "../every_case.h"
#include "../on_threads.h"
#include "base/error.h"
#include "comm/hosts/hosts.h"
#include "comm/calls/strided_parts.h"
#include "comm/transports/thread_communicator.h"

namespace ds::comm {
namespace {

using namespace std::chrono_literals;

template <typename Body>
void on_hosts(const std::vector<int64_t>& hosts, Body body) {
  auto inners = thread_communicators(static_cast<int>(hosts.size()));
  on_threads(hosts.size(), [&](int rank) {
    auto made = hierarchical_communicator(inners[rank], 20s, {}, hosts[rank]);
    body(static_cast<int>(rank), made);
  });
}

at::Tensor given(int round, int rank, int64_t numel, at::ScalarType type) {
  return at::remainder(at::arange(numel, at::kLong) * 7 + round * 3 + rank * 5, 11).to(type);
}

at::Tensor sum_of(int round, int size, int64_t numel) {
  at::Tensor sum = given(round, 0, numel, at::kLong);
  for (int r = 1; r < size; ++r) sum = sum + given(round, r, numel, at::kLong);
  return sum;
}

const std::vector<std::vector<int64_t>> kLayouts = {{7, 7, 9, 9}, {7, 9, 7}, {1, 1, 1, 2, 3}, {4, 5, 4, 5, 6, 4, 5, 6}};

TEST(Hosts, AreFoundByTheirRanks) {
  const Hosts hosts = group_by_host({4, 5, 4, 5, 6}, 3);
  EXPECT_EQ(hosts.ranks, (std::vector<std::vector<int>>{{0, 2}, {1, 3}, {4}}));
  EXPECT_EQ(hosts.mine, 1);
  EXPECT_EQ(hosts.local, 1);
  EXPECT_FALSE(hosts.leads());
  EXPECT_EQ(hosts.leaders(), (std::vector<int>{0, 1, 4}));
  EXPECT_EQ(hosts.host_of(2), 0);
  EXPECT_EQ(hosts.local_rank_of(2), 1);
}

TEST(Hierarchical, IsForSeveralHostsOfSeveralRanks) {
  on_hosts({1, 1, 1}, [](int, const CommunicatorPtr& comm) { EXPECT_FALSE(comm); });
  on_hosts({1, 2, 3}, [](int, const CommunicatorPtr& comm) { EXPECT_FALSE(comm); });
  on_hosts({1, 2, 1}, [](int, const CommunicatorPtr& comm) {
    ASSERT_TRUE(comm);
    EXPECT_EQ(comm->name(), "hierarchical");
    EXPECT_EQ(comm->size(), 3);
  });
}

TEST(Hierarchical, RandomCollectivesEqualASerialModel) {
  for (const auto& layout : kLayouts) {
    const int size = static_cast<int>(layout.size());
    on_hosts(layout, [&](int rank, const CommunicatorPtr& comm) {
      ASSERT_TRUE(comm);
      std::mt19937 random(5);
      for (int round = 0; round < (every_case() ? 150 : 50); ++round) {
        const at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kInt, at::kDouble};
        const at::ScalarType type = types[random() % 4];
        const int64_t numel = static_cast<int64_t>(random() % (random() % 10 == 0 ? 60000 : 100));
        const int root = static_cast<int>(random() % layout.size());
        const at::Tensor mine = given(round, rank, numel, type);
        switch (random() % 6) {
          case 0:
            comm->all_reduce(mine, ReduceOp::kSum, "t")->wait();
            ASSERT_TRUE(at::equal(mine, sum_of(round, size, numel).to(type)));
            break;
          case 1: {
            comm->all_reduce(mine, ReduceOp::kMin)->wait();
            at::Tensor least = given(round, 0, numel, type);
            for (int r = 1; r < size; ++r) least = at::minimum(least, given(round, r, numel, type));
            ASSERT_TRUE(at::equal(mine, least));
            break;
          }
          case 2:
            comm->broadcast(mine, root)->wait();
            ASSERT_TRUE(at::equal(mine, given(round, root, numel, type)));
            break;
          case 3: {
            const at::Tensor all = at::empty({size, numel}, mine.options());
            comm->all_gather(mine, all)->wait();
            for (int r = 0; r < size; ++r) ASSERT_TRUE(at::equal(all[r], given(round, r, numel, type)));
            break;
          }
          case 4: {  // every second time in place, and from bf16 into fp32
            const at::Tensor input = given(round, rank, numel * size, type).view({size, numel});
            const bool wide = type == at::kBFloat16 && round % 2;
            const at::Tensor output =
                round % 2 && !wide ? input[rank]
                                   : at::empty({numel}, wide ? input.options().dtype(at::kFloat) : input.options());
            comm->reduce_scatter(input, output)->wait();
            const at::Tensor whole = sum_of(round, size, numel * size).view({size, numel});
            ASSERT_TRUE(at::equal(output, whole[rank].to(output.scalar_type())));
            break;
          }
          default: comm->barrier();
        }
      }
    });
  }
}

TEST(Hierarchical, SixteenBitSumsAreRoundedOnceAndTheSameEverywhere) {
  std::vector<at::Tensor> results(5);
  on_hosts({1, 1, 2, 2, 2}, [&](int rank, const CommunicatorPtr& comm) {
    const at::Tensor mine = at::full({40000}, rank == 0 ? 256.0 : 1.0, at::kBFloat16);
    comm->all_reduce(mine, ReduceOp::kSum)->wait();
    results[rank] = mine;
  });
  for (const at::Tensor& each : results)  // step by step in bf16 it would stay at 256
    EXPECT_TRUE(at::equal(each, at::full({40000}, 260.0, at::kBFloat16)));
}

TEST(Hierarchical, HostsAtDifferentCollectivesStop) {
  setenv("DS_COMM_TRACE_DIR", "/nonexistent", 1);
  std::vector<std::string> texts(4);
  on_hosts({1, 1, 2, 2}, [&](int rank, const CommunicatorPtr& comm) {
    at::Tensor value = at::ones({10});
    texts[rank] = error_of([&] { comm->all_reduce(value, ReduceOp::kSum, rank < 2 ? "first" : "second")->wait(); });
  });
  unsetenv("DS_COMM_TRACE_DIR");
  for (const std::string& text : texts) {
    EXPECT_TRUE(says(text,
                     "the hosts call different collectives: that of rank 0 all_reduce(10 x float32, sum) of \"first\"; "
                     "that of rank 2 all_reduce(10 x float32, sum) of \"second\""));
    EXPECT_TRUE(says(text, "could not be written"));
  }
}

// ---- all_to_all
// ------------------------------------------------------------------------------------------------------ Messages with
// rows between ranks of different hosts, by sender and receiver; fingerprints are bytes, rows are not.
struct Messages {
  std::mutex mutex;
  std::map<std::pair<int, int>, int> rows;
};

// Sends and receives alone, as over a network, and counts.
class Network : public Communicator {
 public:
  Network(CommunicatorPtr inner, std::vector<int> members, std::vector<int64_t> hosts, std::shared_ptr<Messages> counts)
      : inner_(std::move(inner)), members_(std::move(members)), hosts_(std::move(hosts)), counts_(std::move(counts)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return "network"; }
  bool carries(const Op& op) const override { return op.verb == Verb::kSend || op.verb == Verb::kRecv; }
  PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }
  CommunicatorPtr among(const std::vector<int>& ranks) override {
    return std::make_shared<Network>(inner_->among(ranks), ranks, hosts_, counts_);
  }

 protected:
  bool pairwise() const override { return true; }
  WorkPtr start(const Op& op) override {
    const int from = members_[rank()], to = op.verb == Verb::kSend ? members_[op.peer] : from;
    if (hosts_[from] != hosts_[to] && op.in.scalar_type() != at::kByte && op.in.scalar_type() != at::kLong) {
      std::lock_guard lock(counts_->mutex);
      ++counts_->rows[{from, to}];
    }
    return inner_->run(op);
  }

 private:
  const CommunicatorPtr inner_;
  const std::vector<int> members_;  // as the whole group calls them
  const std::vector<int64_t> hosts_;
  const std::shared_ptr<Messages> counts_;
};

using Counts = std::vector<std::vector<int64_t>>;  // [giver][taker]

Counts random_counts(std::mt19937& random, size_t size, bool large) {
  Counts counts(size, std::vector<int64_t>(size));
  const unsigned kind = random() % 5;  // 0: nothing at all
  for (size_t giver = 0; giver < size; ++giver)
    for (size_t taker = 0; taker < size; ++taker) {
      const bool none = kind == 0 || random() % 3 == 0 || (kind == 1 && giver == size - 1);
      counts[giver][taker] = none ? 0 : static_cast<int64_t>(random() % (large ? 40000 : 9));
    }
  return counts;
}

at::Tensor rows_between(int giver, int taker, int64_t count, at::ScalarType type) {
  return at::remainder(at::arange(count, at::kLong) * 3 + giver * 17 + taker * 5, 97).to(type);
}

std::vector<int64_t> column(const Counts& counts, int taker) {
  std::vector<int64_t> made;
  for (const auto& row : counts) made.push_back(row[taker]);
  return made;
}

// The tensors that `rank` gives, and those that it must get by the plain loop.
std::pair<at::Tensor, at::Tensor> both_sides(const Counts& counts, int rank, at::ScalarType type) {
  std::vector<at::Tensor> give, take;
  for (int r = 0; r < static_cast<int>(counts.size()); ++r) {
    give.push_back(rows_between(rank, r, counts[rank][r], type));
    take.push_back(rows_between(r, rank, counts[r][rank], type));
  }
  return {at::cat(give), at::cat(take)};
}

std::vector<std::vector<int64_t>> layouts(size_t world, int64_t hosts) {
  std::vector<int64_t> in_turn, in_runs;
  for (size_t rank = 0; rank < world; ++rank) {
    in_turn.push_back(static_cast<int64_t>(rank) % hosts);
    in_runs.push_back(std::min(hosts - 1, static_cast<int64_t>(rank) * hosts / static_cast<int64_t>(world - 1)));
  }
  return {in_turn, in_runs};
}

TEST(Hierarchical, AnAllToAllIsOneMessageForEachPairOfHosts) {
  for (size_t world = 2; world <= 8; ++world)
    for (int64_t hosts = 2; hosts <= 3; ++hosts)
      for (const auto& layout : layouts(world, hosts)) {
        const auto counted = std::make_shared<Messages>();
        const auto inners = thread_communicators(static_cast<int>(world));
        std::vector<int> all;
        for (size_t rank = 0; rank < world; ++rank) all.push_back(static_cast<int>(rank));
        const bool shared = std::set<int64_t>(layout.begin(), layout.end()).size() < world;
        std::vector<CommunicatorPtr> networks, made(world);
        for (const auto& inner : inners) networks.push_back(std::make_shared<Network>(inner, all, layout, counted));
        const auto on_ranks = [&](const auto& body) {
          std::vector<std::thread> threads;
          for (const int rank : all) threads.emplace_back([&body, rank] { body(rank); });
          for (auto& thread : threads) thread.join();
        };
        on_ranks([&](int rank) { made[rank] = hierarchical_communicator(networks[rank], 20s, {}, layout[rank]); });
        for (const auto& each : made) ASSERT_EQ(each != nullptr, shared);
        if (!shared) continue;
        std::mt19937 random(static_cast<unsigned>(world * 10 + hosts));
        for (int round = 0; round < 12; ++round) {
          const at::ScalarType type = round % 3 ? at::kFloat : at::kBFloat16;
          const Counts counts = random_counts(random, world, round == 7);
          std::vector<at::Tensor> ours(world), direct(world);
          const auto exchange = [&](std::vector<CommunicatorPtr>& by, std::vector<at::Tensor>& got) {
            counted->rows.clear();
            on_ranks([&](int rank) {
              const auto [give, take] = both_sides(counts, rank, type);
              got[rank] = at::full_like(take, -1);
              by[rank]->all_to_all(give, counts[rank], got[rank], column(counts, rank), "rows")->wait();
              ASSERT_TRUE(at::equal(got[rank], take));
            });
            return counted->rows;
          };
          const auto few = exchange(made, ours), many = exchange(networks, direct);
          std::map<std::pair<int, int>, int> wanted, each_pair;  // of leaders; of ranks
          for (const int giver : all)
            for (const int taker : all) {
              if (layout[giver] == layout[taker] || counts[giver][taker] == 0) continue;
              const auto leader = [&](int rank) {
                return static_cast<int>(std::find(layout.begin(), layout.end(), layout[rank]) - layout.begin());
              };
              wanted[{leader(giver), leader(taker)}] = 1;
              each_pair[{giver, taker}] = 1;
            }
          EXPECT_EQ(few, wanted) << world << " ranks on " << hosts << " hosts";
          EXPECT_EQ(many, each_pair);
          for (const int rank : all) ASSERT_TRUE(at::equal(ours[rank], direct[rank]));
        }
      }
}

TEST(Hierarchical, AnAllToAllOfEqualPartsOfViewsAndOfNothing) {
  for (const auto& layout : kLayouts) {
    const int size = static_cast<int>(layout.size());
    on_hosts(layout, [&](int rank, const CommunicatorPtr& comm) {
      for (const int64_t width : {3, 0, 1}) {
        const at::Tensor mine = at::arange(size, at::kDouble).view({size, 1}).expand({size, width}) + rank * 100;
        const at::Tensor got = at::full({size, width}, -1.0, at::kDouble);
        comm->all_to_all(mine.contiguous(), got)->wait();
        for (int r = 0; r < size; ++r) ASSERT_TRUE(at::equal(got[r], at::full({width}, r * 100.0 + rank, at::kDouble)));
      }
      // Columns of one matrix to columns of another.
      const at::Tensor given_columns = at::arange(4 * size, at::kLong).view({4, size}) + rank * 1000;
      const at::Tensor taken_columns = at::full({4, size}, -1, at::kLong);
      StridedParts::Views give, take;
      for (int r = 0; r < size; ++r) {
        give.push_back({given_columns.select(1, r)});
        take.push_back({taken_columns.select(1, size - 1 - r)});
      }
      comm->run(strided_all_to_all(std::make_shared<StridedParts>(give, take), "columns", rank % 2 == 0))->wait();
      for (int r = 0; r < size; ++r) {
        const at::Tensor theirs = at::arange(4 * size, at::kLong).view({4, size}).select(1, rank) + r * 1000;
        ASSERT_TRUE(at::equal(taken_columns.select(1, size - 1 - r), theirs));
      }
    });
  }
}

TEST(Hierarchical, ForScriptsOnlyExchangesGoByHosts) {
  const std::vector<int64_t> layout = {1, 1, 2, 2};
  const auto counted = std::make_shared<Messages>();
  const auto inners = thread_communicators(4);
  std::vector<CommunicatorPtr> made(4);
  const auto on_ranks = [&](const auto& body) { on_threads(4, body); };
  on_ranks([&](int rank) {
    const CommunicatorPtr network =
        std::make_shared<Network>(inners[rank], std::vector<int>{0, 1, 2, 3}, layout, counted);
    made[rank] = hierarchical_communicator(network, 20s, {}, layout[rank], ByHosts::kExchanges);
  });
  for (const auto& each : made) ASSERT_TRUE(each);
  counted->rows.clear();
  on_ranks([&](int rank) {
    EXPECT_EQ(made[rank]->name(), "network");
    const at::Tensor value = at::full({3}, rank + 1.0);
    made[rank]->all_reduce(value, ReduceOp::kSum)->wait();
    ASSERT_TRUE(at::equal(value, at::full({3}, 10.0)));
  });
  const auto reduction = counted->rows;
  EXPECT_EQ(reduction.size(), 8u);  // each rank to each of the other host
  counted->rows.clear();
  on_ranks([&](int rank) {
    const at::Tensor mine = at::arange(4, at::kInt) + rank * 10, got = at::zeros({4}, at::kInt);
    Op call{Verb::kAllToAll, mine, got, {}, {}, ReduceOp::kSum, -1, "rows"};
    call.wait = Wait::kDetached;  // and nobody waits before it has come to its end
    const WorkPtr work = made[rank]->run(call);
    while (!work->ready()) std::this_thread::yield();
    for (int r = 0; r < 4; ++r) ASSERT_EQ(got[r].item<int>(), r * 10 + rank);
  });
  EXPECT_EQ(counted->rows, (std::map<std::pair<int, int>, int>{{{0, 2}, 1}, {{2, 0}, 1}}));
}

TEST(Hierarchical, HostsThatGiveWhatNobodyTakesStop) {
  setenv("DS_COMM_TRACE_DIR", "/nonexistent", 1);
  std::vector<std::string> texts(6);
  on_hosts({1, 1, 2, 2, 3, 3}, [&](int rank, const CommunicatorPtr& comm) {
    std::vector<int64_t> give(6, 1), take(6, 1);
    if (rank == 1) give[2] = 4;  // which takes 1
    texts[rank] = error_of([&] { comm->all_to_all(at::ones({rank == 1 ? 9 : 6}), give, at::ones({6}), take)->wait(); });
  });
  unsetenv("DS_COMM_TRACE_DIR");
  for (const std::string& text : texts)
    EXPECT_TRUE(
        says(text, "the ranks on the host of rank 0 give 7 elements to those on the host of rank 2, which take 4"));
}

}  // namespace
}  // namespace ds::comm

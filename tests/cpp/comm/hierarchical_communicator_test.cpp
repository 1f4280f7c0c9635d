// Ranks that are threads, on hosts that are told to be different ones.
#include "comm/transports/hierarchical_communicator.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <thread>

#include "base/error.h"
#include "comm/hosts.h"
#include "comm/transports/thread_communicator.h"

namespace ds::comm {
namespace {

using namespace std::chrono_literals;

template <typename Body>
void on_hosts(const std::vector<int64_t>& hosts, Body body) {
  auto inners = thread_communicators(static_cast<int>(hosts.size()));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < hosts.size(); ++rank)
    threads.emplace_back([&, rank] {
      auto made = hierarchical_communicator(inners[rank], 20s, {}, hosts[rank]);
      body(static_cast<int>(rank), made);
    });
  for (auto& thread : threads) thread.join();
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
  EXPECT_EQ(hosts.place_of(2), 1);
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
      for (int round = 0; round < 150; ++round) {
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
    try {
      at::Tensor value = at::ones({10});
      if (rank < 2) {
        comm->all_reduce(value, ReduceOp::kSum, "first")->wait();
      } else {
        comm->all_reduce(value, ReduceOp::kSum, "second")->wait();
      }
    } catch (const Error& error) {
      texts[rank] = error.what();
    }
  });
  unsetenv("DS_COMM_TRACE_DIR");
  for (const std::string& text : texts) {
    EXPECT_NE(
        text.find("the hosts call different collectives: that of rank 0 all_reduce(10 x float32, sum) of \"first\"; "
                  "that of rank 2 all_reduce(10 x float32, sum) of \"second\""),
        std::string::npos)
        << text;
    EXPECT_NE(text.find("could not be written"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace ds::comm

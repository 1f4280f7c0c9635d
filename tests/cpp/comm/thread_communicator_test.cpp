#include "comm/transports/thread_communicator.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <thread>

#include "../error_of.h"
#include "../on_threads.h"
#include "base/error.h"
#include "comm/decorators/logged.h"
#include "comm/transports/local_communicator.h"

namespace ds::comm {
namespace {

template <typename Body>
void on_ranks(int size, Body body) {
  auto ranks = thread_communicators(size);
  on_threads(size, [&](int rank) { body(rank, *ranks[rank]); });
}

TEST(ThreadCommunicator, AllReduceOverSizesAndTypes) {
  for (int size = 1; size <= 8; ++size) {
    for (auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt}) {
      for (int64_t numel : {0, 1, 7, 1000}) {
        on_ranks(size, [&](int rank, Communicator& comm) {
          at::Tensor sum = at::full({numel}, rank + 1, at::TensorOptions().dtype(type));
          comm.all_reduce(sum, ReduceOp::kSum)->wait();
          EXPECT_TRUE(at::equal(sum, at::full({numel}, size * (size + 1) / 2, sum.options())));
          at::Tensor most = at::full({numel}, rank, at::TensorOptions().dtype(type));
          comm.all_reduce(most, ReduceOp::kMax)->wait();
          EXPECT_TRUE(at::equal(most, at::full({numel}, size - 1, most.options())));
        });
      }
    }
  }
}

TEST(ThreadCommunicator, BroadcastFromEachRoot) {
  on_ranks(4, [](int rank, Communicator& comm) {
    for (int root = 0; root < 4; ++root) {
      at::Tensor value = at::full({3}, rank);
      comm.broadcast(value, root)->wait();
      EXPECT_TRUE(at::equal(value, at::full({3}, root)));
    }
    comm.barrier();
  });
}

TEST(ThreadCommunicator, ManyRoundsKeepTheirOrder) {
  on_ranks(3, [](int rank, Communicator& comm) {
    for (int round = 0; round < 500; ++round) {
      at::Tensor value = at::full({1}, round + rank, at::kLong);
      comm.all_reduce(value, ReduceOp::kSum)->wait();
      ASSERT_EQ(value.item<int64_t>(), 3 * round + 3);
    }
  });
}

TEST(ThreadCommunicator, DifferentCollectivesFailOnEveryRank) {
  on_ranks(2, [](int rank, Communicator& comm) {
    EXPECT_TRUE(
        says(error_of([&] { comm.all_reduce(at::zeros({rank + 1}), ReduceOp::kSum)->wait(); }), "collectives differ"));
  });
}

TEST(ThreadCommunicator, ARankThatLeavesFailsTheOthers) {
  auto ranks = thread_communicators(2);
  std::thread other([&] { ranks[1].reset(); });
  EXPECT_THROW(ranks[0]->all_reduce(at::zeros({1}), ReduceOp::kSum), Error);
  other.join();
}

TEST(LoggedCommunicator, LogsEachCallOnceWhileTheLogIsOn) {
  on_ranks(2, [](int, Communicator& inner) {
    const auto log = std::make_shared<CallLog>();
    const CommunicatorPtr borrowed(&inner, [](Communicator*) {});
    const CommunicatorPtr below = logged(borrowed, log);
    EXPECT_EQ(logged(below, log), below);
    LoggedCommunicator comm(below, log);  // calls of the one below belong to those of this one
    at::Tensor value = at::ones({4}), all = at::empty({8}), part = at::empty({2});
    comm.all_reduce(value, ReduceOp::kSum)->wait();
    EXPECT_TRUE(log->take().empty());
    log->turn(true);
    WorkPtr work = comm.all_reduce(value, ReduceOp::kSum);
    EXPECT_TRUE(work->ready());
    EXPECT_TRUE(at::equal(value, at::full({4}, 4.0)));  // before wait()
    work->wait();
    comm.all_gather(value, all)->wait();
    comm.reduce_scatter(value, part)->wait();
    below->broadcast(value, 1)->wait();
    const auto calls = log->take();
    ASSERT_EQ(calls.size(), 4u);
    const std::vector<std::pair<std::string, int64_t>> expected = {
        {"all_reduce", 16}, {"all_gather", 16}, {"reduce_scatter", 16}, {"broadcast", 16}};
    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(calls[i].op, expected[i].first);
      EXPECT_EQ(calls[i].bytes, expected[i].second);
      EXPECT_EQ(calls[i].ranks, 2);
      EXPECT_GE(calls[i].ms, 0.0);
    }
    {
      const CallScope script(log);
      comm.all_reduce(value, ReduceOp::kSum)->wait();
    }
    EXPECT_TRUE(log->take().empty());
    log->turn(false);
    comm.broadcast(value, 1)->wait();
    EXPECT_TRUE(log->take().empty());
    EXPECT_EQ(comm.traffic().calls, 6);
  });
}

TEST(LocalCommunicator, IsTheIdentity) {
  auto comm = local_communicator();
  at::Tensor value = at::ones({2});
  comm->all_reduce(value, ReduceOp::kSum)->wait();
  EXPECT_TRUE(at::equal(value, at::ones({2})));
  EXPECT_EQ(comm->size(), 1);
}

}  // namespace
}  // namespace ds::comm

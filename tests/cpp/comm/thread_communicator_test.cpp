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

TEST(LoggedCommunicator, RecordsEachCallOnceWhileSomebodyListens) {
  on_ranks(2, [](int, Communicator& inner) {
    const auto log = std::make_shared<CallLog>();
    const CommunicatorPtr borrowed(&inner, [](Communicator*) {});
    const CommunicatorPtr below = logged(borrowed, log);
    EXPECT_EQ(logged(below, log), below);
    LoggedCommunicator comm(below, log, "ours");  // calls of the one below belong to those of this one
    at::Tensor value = at::ones({4}), all = at::empty({8}), part = at::empty({2});
    comm.all_reduce(value, ReduceOp::kSum)->wait();
    const auto listener = std::make_shared<CallRecorder>(/*waits=*/true);
    log->add(listener);
    WorkPtr work = comm.all_reduce(value, ReduceOp::kSum);
    EXPECT_TRUE(work->ready());
    EXPECT_TRUE(at::equal(value, at::full({4}, 4.0)));  // before wait()
    work->wait();
    comm.all_gather(value, all)->wait();
    comm.reduce_scatter(value, part)->wait();
    below->broadcast(value, 1)->wait();
    const auto calls = listener->take();
    ASSERT_EQ(calls.size(), 4u);
    const std::vector<std::pair<std::string, int64_t>> expected = {
        {"all_reduce", 16}, {"all_gather", 16}, {"reduce_scatter", 16}, {"broadcast", 16}};
    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(calls[i].op, expected[i].first);
      EXPECT_EQ(calls[i].bytes, expected[i].second);
      EXPECT_EQ(calls[i].ranks, 2);
      EXPECT_EQ(calls[i].group, i < 3 ? "ours" : "");
      EXPECT_EQ(calls[i].number, i < 3 ? i + 1 : 4);  // calls without a listener have numbers, too
      EXPECT_GE(calls[i].end - calls[i].begin, 0.0);
      EXPECT_EQ(calls[i].blocked, calls[i].end - calls[i].begin);
    }
    {
      const CallScope script(log);
      comm.all_reduce(value, ReduceOp::kSum)->wait();
    }
    EXPECT_TRUE(listener->take().empty());
    log->remove(listener);
    comm.broadcast(value, 1)->wait();
    EXPECT_TRUE(listener->take().empty());
    EXPECT_EQ(comm.traffic().calls, 6);
  });
}

TEST(LoggedCommunicator, ListenersComeAndGoInAnyOrder) {
  on_ranks(2, [](int, Communicator& inner) {
    const auto log = std::make_shared<CallLog>();
    const auto comm = logged(CommunicatorPtr(&inner, [](Communicator*) {}), log);
    const auto trace = std::make_shared<CallRecorder>(false), logger = std::make_shared<CallRecorder>(true);
    const auto clock = std::make_shared<StepClock>();
    clock->turn(true);
    const InPhase training(*clock, Phase::kOptimizer);
    const auto call = [&] {
      const at::Tensor value = at::ones({4});
      comm->all_reduce(value, ReduceOp::kSum)->wait();
      return std::make_pair(trace->take().size(), logger->take().size());
    };
    const auto in_phase = [&](Phase phase) { return clock->totals().all[static_cast<size_t>(phase)]; };
    using Counts = std::pair<size_t, size_t>;
    log->add(trace);
    EXPECT_EQ(call(), Counts(1, 0));
    EXPECT_FALSE(log->waits());
    log->add(logger);
    const auto waits = std::make_shared<StepWaits>(clock, c10::Device(at::kCPU));
    log->add(waits);
    EXPECT_TRUE(log->waits());
    EXPECT_EQ(in_phase(Phase::kReduction), 0);
    EXPECT_EQ(call(), Counts(1, 1));
    EXPECT_GT(in_phase(Phase::kReduction), 0);
    log->remove(trace);
    log->remove(trace);  // again: nothing happens
    EXPECT_EQ(call(), Counts(0, 1));
    log->add(trace);
    log->remove(logger);
    EXPECT_FALSE(log->waits());
    EXPECT_EQ(call(), Counts(1, 0));
    log->remove(trace);
    EXPECT_TRUE(log->on());
    EXPECT_FALSE(log->records());
    comm->barrier();
    EXPECT_GT(in_phase(Phase::kCommunication), 0);
    log->remove(waits);
    EXPECT_FALSE(log->on());
    const int64_t before = in_phase(Phase::kReduction);
    EXPECT_EQ(call(), Counts(0, 0));
    EXPECT_EQ(in_phase(Phase::kReduction), before);
  });
}

TEST(LoggedCommunicator, ACallThatDoesNotWaitIsRecordedWhenSomebodyHasWaited) {
  on_ranks(2, [](int rank, Communicator& inner) {
    const auto log = std::make_shared<CallLog>();
    const auto comm = logged(CommunicatorPtr(&inner, [](Communicator*) {}), log);
    const auto trace = std::make_shared<CallRecorder>(false);
    log->add(trace);
    const at::Tensor value = at::ones({4});
    const WorkPtr work = comm->all_reduce(value, ReduceOp::kSum, "a gradient");
    EXPECT_TRUE(trace->take().empty());
    std::this_thread::sleep_for(milliseconds(20));  // other work
    work->wait();
    work->wait();
    const auto calls = trace->take();
    ASSERT_EQ(calls.size(), 1u);
    EXPECT_EQ(calls[0].tag, "a gradient");
    EXPECT_GE(calls[0].end - calls[0].begin, 0.02);
    EXPECT_LE(calls[0].blocked, calls[0].end - calls[0].begin - 0.02);
    comm->run_all({{rank == 0 ? Verb::kSend : Verb::kRecv,
                    rank == 0 ? value : at::Tensor(),
                    rank == 0 ? at::Tensor() : value,
                    {},
                    {},
                    ReduceOp::kSum,
                    1 - rank}})
        ->wait();
    const auto messages = trace->take();
    ASSERT_EQ(messages.size(), 1u);
    EXPECT_EQ(messages[0].op, rank == 0 ? "send" : "recv");
    EXPECT_EQ(messages[0].number, -1);
  });
}

// Each call arrives late.
class SlowLink : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

 protected:
  WorkPtr start(const Op& op) override {
    return std::make_shared<JoinedWork>(std::vector<WorkPtr>{inner_->run(op)},
                                        [] { std::this_thread::sleep_for(milliseconds(50)); });
  }
};

TEST(LoggedCommunicator, ASlowLinkIsTimeOfCommunication) {
  on_ranks(2, [](int, Communicator& inner) {
    const auto log = std::make_shared<CallLog>();
    const auto clock = std::make_shared<StepClock>();
    clock->turn(true);
    const auto waits = std::make_shared<StepWaits>(clock, c10::Device(at::kCPU));
    log->add(waits);
    const auto comm = logged(std::make_shared<SlowLink>(CommunicatorPtr(&inner, [](Communicator*) {})), log);
    const InPhase backward(*clock, Phase::kBackward);
    const at::Tensor value = at::ones({4});
    const WorkPtr work = comm->all_reduce(value, ReduceOp::kSum);
    const int64_t issued = clock->totals().all[static_cast<size_t>(Phase::kReduction)];
    work->wait();
    const StepClock::Totals totals = clock->totals();
    EXPECT_GE(totals.all[static_cast<size_t>(Phase::kReduction)] - issued, 50'000'000);
    EXPECT_EQ(totals.all[static_cast<size_t>(Phase::kReduction)],
              totals.in_backward[static_cast<size_t>(Phase::kReduction)]);
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

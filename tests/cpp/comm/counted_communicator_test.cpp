// One rank of a group whose other ranks do not exist.
#include "comm/transports/counted_communicator.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/error.h"
#include "comm/shared_memory/shm_group.h"
#include "comm/calls/strided_parts.h"

namespace ds::comm {
namespace {

at::Tensor numbers(std::vector<float> values) { return at::tensor(values, at::kFloat); }

TEST(CountedCommunicator, NumbersOfTheHostAreThoseOfEqualRanks) {
  const CommunicatorPtr group = counted_communicator(1, 3);
  const at::Tensor value = numbers({1, 2});
  group->all_reduce(value, ReduceOp::kSum)->wait();
  EXPECT_TRUE(value.equal(numbers({3, 6})));
  group->all_reduce(value, ReduceOp::kMax)->wait();
  group->broadcast(value, 0)->wait();
  EXPECT_TRUE(value.equal(numbers({3, 6})));
  const at::Tensor all = at::zeros({6});
  group->all_gather(value, all)->wait();
  EXPECT_TRUE(all.equal(numbers({3, 6, 3, 6, 3, 6})));
  const at::Tensor part = at::zeros({2});
  group->reduce_scatter(numbers({0, 0, 1, 2, 5, 5}), part)->wait();
  EXPECT_TRUE(part.equal(numbers({3, 6})));
  group->all_to_all(numbers({9, 4, 8}), {1, 1, 1}, all.narrow(0, 0, 3), {1, 1, 1})->wait();
  EXPECT_TRUE(all.narrow(0, 0, 3).equal(numbers({4, 4, 4})));
  group->recv(part, 0)->wait();
  EXPECT_TRUE(part.equal(at::zeros({2})));
  EXPECT_EQ(group->traffic().calls, 7);
}

TEST(CountedCommunicator, MetaTensorsAreTakenAndCallsAreChecked) {
  const CommunicatorPtr group = counted_communicator(0, 2);
  const auto meta = at::TensorOptions().device(at::kMeta);
  group->all_gather(at::empty({4}, meta), at::empty({8}, meta))->wait();
  EXPECT_THROW(group->all_gather(at::empty({4}, meta), at::empty({9}, meta)), Error);
  EXPECT_THROW(counted_communicator(2, 2), Error);
  EXPECT_EQ(group->among({0})->size(), 1);
}

TEST(CountedCommunicator, CallsTakeTheTimeOfTheirBytes) {
  const auto step = std::make_shared<plan::StepPlan>();
  const CommunicatorPtr group = counted_communicator(0, 4, "dp", {step, plan::LinkCost{10, 1'000'000'000}});
  const int64_t takes = 2 * 10 + 2 * 4000 * 3 / 4;  // a ring sends each byte twice, but for this rank's share
  const auto meta = at::TensorOptions().device(at::kMeta);
  const WorkPtr work = group->all_reduce(at::zeros({1000}, meta), ReduceOp::kSum);
  EXPECT_EQ(step->now(), 0);
  work->wait();
  EXPECT_EQ(step->now(), takes);
  // Several tensors in one call: one latency for the bytes of both.
  group
      ->all_gather(
          {{at::zeros({500}, meta), at::zeros({2000}, meta)}, {at::zeros({500}, meta), at::zeros({2000}, meta)}})
      ->wait();
  EXPECT_EQ(step->now(), takes + 2 * 10 + 4 * 4000 * 3 / 4);
}

// Hosts exchange numbers beside their devices: the stream that computes goes on.
TEST(CountedCommunicator, NumbersInHostMemoryTakeTheTimeOfTheHost) {
  const auto step = std::make_shared<plan::StepPlan>();
  const CommunicatorPtr group = counted_communicator(0, 4, "dp", {step, plan::LinkCost{10, 1'000'000'000}});
  step->compute(100'000);
  group->all_reduce(at::zeros({1000}), ReduceOp::kSum)->wait();
  step->compute(10);
  EXPECT_EQ(step->now(), 100'010) << "the host was through before the device";
  EXPECT_EQ(step->waited(), 0);
}

TEST(CountedCommunicator, AnExchangeTouchesSharedMemoryOrPacksItsRows) {
  int64_t touched = -1;
  const auto rows = at::empty({3, 100}, at::TensorOptions().device(at::kMeta).dtype(at::kFloat));
  const auto exchange = [&](const CommunicatorPtr& group) {
    StridedParts::Views give(3), take(3);
    for (int rank = 0; rank < 3; ++rank) {
      give[rank].emplace_back(rows[rank].narrow(0, 0, 40 * rank));
      take[rank].emplace_back(rows[rank]);
    }
    group->run(strided_all_to_all(std::make_shared<StridedParts>(give, take), "sequence"))->wait();
  };
  exchange(counted_communicator(2, 3, "sp", {nullptr, {}, [&](int64_t bytes) { touched = bytes; }}));
  EXPECT_EQ(touched, ShmGroup::exchange_memory(3, 160)) << "the longest message to another rank";
  touched = -1;
  exchange(counted_communicator(2, 3));
  EXPECT_EQ(touched, -1);
}

TEST(CountedCommunicator, MessagesInHostMemoryReachPlannedPeers) {
  const PlannedPeers store = c10::make_intrusive<c10d::HashStore>();
  const auto step = std::make_shared<plan::StepPlan>();
  const CountedTime time{step, plan::LinkCost{10, 1'000'000'000}};
  const CommunicatorPtr first = counted_communicator(0, 3, "pipe", time, store);
  const CommunicatorPtr last = counted_communicator(2, 3, "pipe", time, store);
  for (const float value : {4, 7}) first->send(numbers({value, 5}), 2)->wait();
  const at::Tensor got = at::zeros({2});
  for (const float value : {4, 7}) {
    last->recv(got, 0)->wait();
    EXPECT_TRUE(got.equal(numbers({value, 5})));
  }
  first->send(at::empty({4}, at::TensorOptions().device(at::kMeta)), 2)->wait();
  EXPECT_EQ(step->now(), 0) << "pipe_cost has the times of messages";
  first->send(numbers({1}), 2);
  EXPECT_THROW(last->recv(got, 0), Error) << "4 bytes for 8";
}

}  // namespace
}  // namespace ds::comm

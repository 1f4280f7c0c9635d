#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <random>
#include <thread>

#include "../on_threads.h"
#include "comm/decorators/forwarding.h"
#include "comm/transports/thread_communicator.h"
#include "zero/gathers/sources/staged_gather.h"
#include "zero/gathers/shard_source.h"

namespace ds::zero {
namespace {

void on_ranks(int world, const std::function<void(int, comm::CommunicatorPtr)>& body) {
  auto comms = comm::thread_communicators(world);
  on_threads(world, [&](int rank) { body(rank, comms[rank]); });
}

std::shared_ptr<storage::ShardStorage> memory() {
  return std::make_shared<storage::ShardStorage>(c10::Device(at::kCPU));
}

// Takes several tensors in one call, as NCCL does.
class Grouping : public comm::ForwardingCommunicator {
 public:
  explicit Grouping(comm::CommunicatorPtr inner) : ForwardingCommunicator(std::move(inner)) {}
  bool groups() const override { return true; }
  int pairs = 0;

 protected:
  comm::WorkPtr start(const comm::Op& op) override {
    std::vector<comm::WorkPtr> parts;
    for (const comm::Op& one : op.each()) parts.push_back(inner_->run(one));
    pairs += static_cast<int>(parts.size());
    return std::make_shared<comm::JoinedWork>(std::move(parts));
  }
};

struct Sharded {
  std::vector<at::Tensor> tensors, values;  // the users' tensors; what is in them
  std::vector<ShardedParamPtr> params;

  Sharded(const std::vector<std::pair<int64_t, at::ScalarType>>& sizes, int world, int rank) {
    for (const auto& [numel, type] : sizes) {
      values.push_back(at::arange(numel, at::kFloat).add(static_cast<double>(100 * values.size())).to(type));
      tensors.push_back(values.back().clone());
      params.push_back(
          std::make_shared<ShardedParam>(tensors.back(), "p" + std::to_string(params.size()), world, rank));
      params.back()->release();
    }
  }
  std::vector<ShardedParam*> raw(const std::vector<int>& which) const {
    std::vector<ShardedParam*> result;
    for (int index : which) result.push_back(params[index].get());
    return result;
  }
  bool right(int index) const {
    return params[index]->available() && at::equal(params[index]->tensor(), values[index]);
  }
};

// Odd sizes, fewer elements than ranks, none at all, several types; staged and not.
TEST(StagedGather, BringsValues) {
  for (int world : {1, 2, 3, 5}) {
    for (int64_t limit : {int64_t{0}, StagedGather::kLimit}) {
      on_ranks(world, [&](int rank, const comm::CommunicatorPtr& comm) {
        const Sharded made({{7, at::kFloat}, {1, at::kBFloat16}, {0, at::kFloat}, {33, at::kHalf}, {5, at::kDouble}},
                           world, rank);
        GatherBuffers buffers(memory());
        StagedGather gather(*comm, buffers, made.raw({0, 1, 2, 3, 4}), Values::kUsed, false, limit);
        EXPECT_EQ(gather.collectives(), limit ? 1 : 4);
        for (const auto& param : made.params) param->take_full(gather.take(*param));
        for (int index = 0; index < 5; ++index) EXPECT_TRUE(made.right(index)) << world << " " << index;
      });
    }
  }
}

// A communicator that takes several tensors in one call: slices go straight into the buffers, by one call.
TEST(StagedGather, OneCallWithoutCopiesWhereACommunicatorGroups) {
  on_ranks(3, [&](int rank, const comm::CommunicatorPtr& comm) {
    const Sharded made({{7, at::kFloat}, {1, at::kBFloat16}, {0, at::kFloat}, {33, at::kHalf}}, 3, rank);
    GatherBuffers buffers(memory());
    Grouping grouping(comm);
    StagedGather gather(grouping, buffers, made.raw({0, 1, 2, 3}));
    EXPECT_EQ(gather.collectives(), 1);
    EXPECT_EQ(grouping.pairs, 3) << "one without elements has none";
    for (const auto& param : made.params) param->take_full(gather.take(*param));
    for (int index = 0; index < 4; ++index) EXPECT_TRUE(made.right(index)) << index;
  });
}

TEST(StagedGather, RefreshesInPlace) {
  for (int64_t limit : {int64_t{0}, StagedGather::kLimit}) {
    on_ranks(2, [&](int rank, const comm::CommunicatorPtr& comm) {
      const Sharded made({{7, at::kFloat}, {4, at::kFloat}}, 2, rank);
      GatherBuffers buffers(memory());
      {
        StagedGather gather(*comm, buffers, made.raw({0, 1}));
        for (const auto& param : made.params) param->take_full(gather.take(*param));
      }
      const void* before = made.params[0]->tensor().data_ptr();
      for (const auto& param : made.params) param->shard().add_(1);
      StagedGather again(*comm, buffers, made.raw({0, 1}), Values::kUsed, true, limit);
      for (const auto& param : made.params) again.take(*param);
      EXPECT_EQ(made.params[0]->tensor().data_ptr(), before);
      for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(made.params[i]->tensor(), made.values[i].add(1)));
    });
  }
}

// A step that repeats the last one: one collective for each unit, forward and backward, and exchanges only where the
// cycle begins and ends.
TEST(ScheduledSource, ARepeatingStepStartsOneCollectiveForEachUnit) {
  constexpr int kUnits = 20;
  for (int world : {1, 2, 4}) {
    on_ranks(world, [&](int rank, const comm::CommunicatorPtr& comm) {
      const Sharded made(std::vector<std::pair<int64_t, at::ScalarType>>(2 * kUnits, {9, at::kFloat}), world, rank);
      auto source = scheduled_source(made.params, {{comm, made.params, nullptr}}, memory());
      for (int step = 0; step < 4; ++step) {
        source->reset_counters();
        for (int position = 0; position < 2 * kUnits; ++position) {
          const int unit = position < kUnits ? position : 2 * kUnits - 1 - position;
          const int next = position + 1 < kUnits ? position + 1 : std::max(2 * kUnits - 2 - position, 0);
          source->gather(made.raw({2 * unit, 2 * unit + 1}), made.raw({2 * next, 2 * next + 1}));
          EXPECT_TRUE(made.right(2 * unit) && made.right(2 * unit + 1));
          for (ShardedParam* param : made.raw({2 * unit, 2 * unit + 1})) param->release();
        }
        source->forget_ahead();
        source->drain();
        EXPECT_EQ(source->collectives(), 2 * kUnits);
        EXPECT_EQ(source->exchanges(), step == 0 ? 2 * kUnits + 1 : 2);
        source->before_write();
        EXPECT_EQ(source->exchanges(), step == 0 ? 2 * kUnits + 2 : 3);
      }
    });
  }
}

// Nobody waits for other ranks between two units: a rank starts the gathers of a whole step ahead and computes, though
// the others have not begun the next one.
TEST(ScheduledSource, GathersAheadDoNotWaitForRanksThatAreBehind) {
  constexpr int kUnits = 12;
  std::atomic<int> behind{0};
  on_ranks(2, [&](int rank, const comm::CommunicatorPtr& comm) {
    const Sharded made(std::vector<std::pair<int64_t, at::ScalarType>>(kUnits, {9, at::kFloat}), 2, rank);
    auto source = scheduled_source(made.params, {{comm, made.params, nullptr}}, memory());
    for (int step = 0; step < 3; ++step) {
      for (int unit = 0; unit < kUnits; ++unit) {
        std::vector<int> ahead;
        for (int next = unit + 1; next < kUnits; ++next) ahead.push_back(next);
        if (step == 2 && rank == 1 && unit == 1)  // all gathers of the other rank are under way, before this one begins
          while (behind == 0) std::this_thread::yield();
        source->gather(made.raw({unit}), made.raw(ahead));
        if (step == 2 && rank == 0 && unit == 0) {
          EXPECT_EQ(source->collectives(), kUnits);
          behind = 1;
        }
        EXPECT_TRUE(made.right(unit));
      }
      for (int unit = 0; unit < kUnits; ++unit) made.params[unit]->release();
      source->forget_ahead();
      source->drain();
      source->reset_counters();
    }
  });
}

// Progressive layer dropping: no collective has what all ranks leave out, and no exchange is added.
TEST(ScheduledSource, UnitsThatAllRanksLeaveOutAreNotGathered) {
  constexpr int kUnits = 10;
  for (int world : {1, 2, 4}) {
    on_ranks(world, [&](int rank, const comm::CommunicatorPtr& comm) {
      const Sharded made(std::vector<std::pair<int64_t, at::ScalarType>>(2 * kUnits, {9, at::kFloat}), world, rank);
      auto source = scheduled_source(made.params, {{comm, made.params, nullptr}}, memory());
      std::mt19937 random(3);
      for (int step = 0; step < 12; ++step) {
        std::vector<int> order, left_out;
        for (int unit = 0; unit < kUnits; ++unit) {
          if (step == 0 || unit == 0 || unit == kUnits - 1 || random() % 2) {
            order.push_back(unit);
          } else {
            left_out.insert(left_out.end(), {2 * unit, 2 * unit + 1});
          }
        }
        const std::vector<int> back(order.rbegin(), order.rend());
        order.insert(order.end(), back.begin(), back.end());
        source->leave_out(made.raw(left_out));
        source->reset_counters();
        for (size_t i = 0; i < order.size(); ++i) {
          const int unit = order[i], next = order[std::min(i + 1, order.size() - 1)];
          source->gather(made.raw({2 * unit, 2 * unit + 1}), made.raw({2 * next, 2 * next + 1}));
          EXPECT_TRUE(made.right(2 * unit) && made.right(2 * unit + 1));
          for (ShardedParam* param : made.raw({2 * unit, 2 * unit + 1})) param->release();
        }
        source->forget_ahead();
        source->drain();
        EXPECT_EQ(source->collectives(), static_cast<int64_t>(order.size())) << "step " << step;
        EXPECT_EQ(source->exchanges(), step == 0 ? 2 * kUnits + 1 : 2) << "step " << step;
        source->leave_out({});
        source->before_write();
      }
    });
  }
}

// Every rank takes branches of its own for a thousand steps: values are right, and nobody waits for ever.
TEST(ScheduledSource, RanksMayTakeRandomBranches) {
  constexpr int kParams = 12;
  for (int world : {2, 3}) {
    on_ranks(world, [&](int rank, const comm::CommunicatorPtr& comm) {
      const Sharded made(std::vector<std::pair<int64_t, at::ScalarType>>(kParams, {5, at::kFloat}), world, rank);
      auto source = scheduled_source(made.params, {{comm, made.params, nullptr}}, memory());
      std::mt19937 random(100 + rank);
      for (int step = 0; step < 1000; ++step) {
        const bool calm = step / 50 % 2 == 0;  // steps that repeat, and steps that do not
        for (int index = 0; index < kParams; ++index) {
          const int which = calm || random() % 3 ? index : static_cast<int>(random() % kParams);
          if (!calm && random() % 5 == 0) continue;
          source->gather(made.raw({which}), made.raw({(which + 1) % kParams}));
          ASSERT_TRUE(made.right(which));
          made.params[which]->release();
        }
        source->forget_ahead();
        source->drain();
      }
    });
  }
}

}  // namespace
}  // namespace ds::zero

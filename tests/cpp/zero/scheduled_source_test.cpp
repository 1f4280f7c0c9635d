#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "../on_threads.h"
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
TEST(StagedGather, BringsValuesAndNotes) {
  for (int world : {1, 2, 3, 5}) {
    for (int64_t limit : {int64_t{0}, StagedGather::kLimit}) {
      on_ranks(world, [&](int rank, const comm::CommunicatorPtr& comm) {
        const Sharded made({{7, at::kFloat}, {1, at::kBFloat16}, {0, at::kFloat}, {33, at::kHalf}, {5, at::kDouble}},
                           world, rank);
        GatherBuffers buffers(memory());
        StagedGather gather(*comm, buffers, made.raw({0, 1, 2, 3, 4}), static_cast<uint8_t>(10 + rank), false, limit);
        EXPECT_EQ(gather.collectives(), limit ? 1 : 6);
        for (const auto& param : made.params) param->take_full(gather.take(*param));
        for (int index = 0; index < 5; ++index) EXPECT_TRUE(made.right(index)) << world << " " << index;
        std::vector<uint8_t> notes;
        for (int other = 0; other < world; ++other) notes.push_back(static_cast<uint8_t>(10 + other));
        EXPECT_EQ(gather.notes(), notes);
      });
    }
  }
}

TEST(StagedGather, RefreshesInPlace) {
  for (int64_t limit : {int64_t{0}, StagedGather::kLimit}) {
    on_ranks(2, [&](int rank, const comm::CommunicatorPtr& comm) {
      const Sharded made({{7, at::kFloat}, {4, at::kFloat}}, 2, rank);
      GatherBuffers buffers(memory());
      {
        StagedGather gather(*comm, buffers, made.raw({0, 1}), std::nullopt);
        for (const auto& param : made.params) param->take_full(gather.take(*param));
      }
      const void* before = made.params[0]->tensor().data_ptr();
      for (const auto& param : made.params) param->shard().add_(1);
      StagedGather again(*comm, buffers, made.raw({0, 1}), std::nullopt, true, limit);
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

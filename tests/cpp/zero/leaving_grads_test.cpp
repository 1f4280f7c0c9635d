// Reduced gradients that leave the device for something slow: as many rows of them are on their way as the
// configuration has named buffers, and backward waits for one to be there before the next one leaves.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/error.h"
#include "storage/tier.h"
#include "trained_ranks.h"
#include "zero/engine.h"

namespace ds::zero {
namespace {

// As slow as can be: while it is closed, a write ends only when somebody waits for it.
struct Gate {
  std::atomic<const storage::ShardStorage*> of{nullptr};  // null: open
  std::atomic<int64_t> writes{0}, waits_before{0}, most_on_device{0};

  void close(const storage::ShardStorage& storage) {
    writes = most_on_device = 0;
    waits_before = storage.usage().budget_waits;
    of = &storage;
  }
  void pass() {
    const int64_t number = writes++;
    while (const storage::ShardStorage* storage = of.load()) {
      const storage::Usage usage = storage->usage();
      if (usage[0].staged > most_on_device) most_on_device = usage[0].staged;
      if (usage.budget_waits - waits_before > number) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
};
Gate gate;

class GatedPart : public storage::Part {
 public:
  explicit GatedPart(const storage::PartSpec& spec) {
    for (const int64_t bytes : spec.block_bytes) blocks_.emplace_back(static_cast<size_t>(bytes), '\0');
  }
  bool any_address() const override { return true; }
  void read(size_t block, char* data) override { std::copy(blocks_[block].begin(), blocks_[block].end(), data); }
  void write(size_t block, char* data) override {
    gate.pass();
    std::copy(data, data + blocks_[block].size(), blocks_[block].begin());
  }

 private:
  std::vector<std::string> blocks_;
};

class GatedTier : public storage::Tier {
 public:
  std::unique_ptr<storage::Part> open(const storage::PartSpec& spec) override {
    return std::make_unique<GatedPart>(spec);
  }
};
const storage::TierRegistration registration("gated",
                                             [](const storage::TierContext&) -> std::unique_ptr<storage::Tier> {
                                               return std::make_unique<GatedTier>();
                                             });

constexpr int kWeights = 9;
constexpr int64_t kNumel = 5 * 1024;  // 10 KiB of gradients in 16 bits, 20 KiB in 32

Program program() {
  Program made;
  for (int i = 0; i < kWeights; ++i) made.begin.push_back(values(i, {kNumel}));
  made.loss = [](const std::vector<at::Tensor>& weights, int step, int rank, int part) {
    at::Tensor loss = at::zeros({});
    for (int i = 0; i < kWeights; ++i) loss = loss + loss_of(weights[i], 10 * step + i);
    return loss;
  };
  return made;
}

struct Seen : Trained {
  int64_t most_on_device = 0, budget_waits = 0;
};

Seen train(int stage, at::ScalarType type, const storage::Placement& placement, int64_t leaving, bool slow) {
  EngineOptions options;
  options.policy = stage_policy(stage);
  options.placements = {placement, placement, placement};
  options.reducer.bucket_numel = kNumel;
  options.swapping.leaving_rows = leaving;
  TrainingRank rank(program(), type, options, mesh_over(comm::local_communicator()));
  storage::ShardStorage& storage = *rank.engine->params().storage();
  Seen seen;
  for (int step = 0; step < 2; ++step) {
    storage.settle();
    if (slow) gate.close(storage);
    rank.accumulate(step, adam_inputs());
    if (slow) {
      EXPECT_GE(gate.writes, 2) << "nothing has been written slowly";
      // An error of a transfer for which nobody waits is seen by the next one.
      seen.most_on_device = std::max({seen.most_on_device, gate.most_on_device.load(), storage.usage()[0].staged});
      gate.of = nullptr;
    }
    rank.update(adam_inputs());
  }
  storage.settle();
  seen.budget_waits = storage.usage().budget_waits;
  EXPECT_EQ(storage.usage()[0].over_budget, 0);
  static_cast<Trained&>(seen) = rank.finish();
  return seen;
}

TEST(LeavingGrads, AreAsManyRowsAsThereAreBuffers) {
  storage::Placement slow;
  slow.rest = storage::medium_named("gated");
  for (int stage : {1, 2}) {
    for (at::ScalarType type : {at::kBFloat16, at::kFloat}) {
      const Seen plain = train(stage, type, {}, 0, false);
      for (int64_t leaving : {1, 3}) {
        const std::string what = words("stage", stage, type);
        const Seen seen = train(stage, type, slow, leaving, true);
        expect_same(seen, plain, what, 1e-12);
        const int64_t row = kNumel * static_cast<int64_t>(c10::elementSize(type));
        EXPECT_GE(seen.most_on_device, leaving * row) << what;
        EXPECT_LE(seen.most_on_device, leaving * (row + 2 * 4096)) << what;
        EXPECT_GE(seen.budget_waits, 2 * (kWeights - leaving)) << what << ": each one more waits";
      }
    }
  }
}

}  // namespace
}  // namespace ds::zero

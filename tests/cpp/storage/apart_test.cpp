// Planes whose blocks lie apart: memory that comes with a block's first use and goes when it is discarded.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "planes.h"

namespace ds::storage {
namespace {

constexpr int64_t kBlock = 8;  // elements
constexpr int64_t kBlockBytes = kBlock * 4;

class Apart : public ::testing::Test {
 protected:
  Apart() : storage_(test_device()), plane_(add()) {}

  PlaneId add() {
    PlaneExtras extras;
    extras.apart = true;
    return storage_.add("gradients", 3 * kBlock, at::kFloat, {}, {kBlock, 2 * kBlock, 3 * kBlock}, extras);
  }
  static plan::Range block(int64_t number) { return {number * kBlock, (number + 1) * kBlock}; }
  int64_t resting() const { return storage_.usage()[0].resting; }
  Lease all(Access access) { return storage_.acquire(plane_, {0, 3 * kBlock}, access, Medium::kDevice); }

  ShardStorage storage_;
  const PlaneId plane_;
};

TEST_F(Apart, MemoryComesWithTheFirstUseAndGoes) {
  EXPECT_EQ(resting(), 0);
  EXPECT_FALSE(storage_.has_memory(plane_, block(1)));
  EXPECT_EQ(storage_.resting(plane_, block(1)), Medium::kDevice);
  EXPECT_TRUE(storage_.occupy(plane_, block(1)));
  EXPECT_FALSE(storage_.occupy(plane_, block(1)));
  EXPECT_EQ(resting(), kBlockBytes);
  EXPECT_EQ(storage_.memory(plane_).size(), 1u);
  fill(storage_.resident(plane_, block(1)), 5);
  EXPECT_TRUE(holds(storage_.resident(plane_, block(1)), 5));
  EXPECT_TRUE(holds(storage_.resident(plane_, {kBlock + 2, kBlock + 4}), 7));
  storage_.discard(plane_, {kBlock + 1, 2 * kBlock});  // not all of the block
  EXPECT_TRUE(storage_.has_memory(plane_, block(1)));
  storage_.discard(plane_, {0, 3 * kBlock});
  EXPECT_EQ(resting(), 0);
  storage_.discard(plane_, {0, 3 * kBlock});
  EXPECT_FALSE(storage_.has_memory(plane_, {0, 3 * kBlock}));
}

TEST_F(Apart, NewMemoryIsZeroForLeasesAndViews) {
  for (int64_t round = 0; round < 2; ++round) {
    EXPECT_EQ(storage_.resident(plane_, {1, 3}).cpu().abs().sum().item<float>(), 0);
    const Lease read = storage_.acquire(plane_, {kBlock, kBlock + 3}, Access::kRead, Medium::kDevice);
    EXPECT_EQ(read.data().cpu().abs().sum().item<float>(), 0);
    // A part of a block is written, and the rest of it is zero.
    {
      const Lease part = storage_.acquire(plane_, {2 * kBlock, 2 * kBlock + 4}, Access::kWrite, Medium::kDevice);
      part.data().fill_(1);
    }
    EXPECT_EQ(storage_.resident(plane_, block(2)).cpu().sum().item<float>(), 4);
    storage_.resident(plane_, block(0)).fill_(9);
    storage_.discard(plane_, block(0));
    storage_.discard(plane_, block(2));
  }
}

TEST_F(Apart, ALeaseOfSeveralBlocksHasThoseThatAreThere) {
  fill(storage_.resident(plane_, block(0)), 0);
  fill(storage_.resident(plane_, block(2)), 2 * kBlock);
  EXPECT_EQ(storage_.resting(plane_, {0, 3 * kBlock}), Medium::kDevice);
  const Lease lease = storage_.acquire(plane_, {2, 3 * kBlock - 1}, Access::kUpdate, Medium::kDevice);
  EXPECT_FALSE(lease.data().defined());
  ASSERT_EQ(lease.pieces().size(), 2u);
  EXPECT_EQ(lease.pieces()[0].begin, 0);
  EXPECT_TRUE(holds(lease.pieces()[0].data, 2));
  EXPECT_EQ(lease.pieces()[0].data.numel(), kBlock - 2);
  EXPECT_EQ(lease.pieces()[1].begin, 2 * kBlock - 2);
  EXPECT_TRUE(holds(lease.pieces()[1].data, 2 * kBlock));
  EXPECT_EQ(lease.pieces()[1].data.numel(), kBlock - 1);
  EXPECT_FALSE(storage_.has_memory(plane_, block(1)));
}

TEST_F(Apart, DiscardWaitsForLeases) {
  auto held = std::make_unique<Lease>(all(Access::kRead));
  storage_.occupy(plane_, block(1));
  std::atomic<bool> discarded{false};
  std::thread other([&] {
    storage_.discard(plane_, {0, 3 * kBlock});
    discarded = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(discarded);
  held.reset();
  other.join();
  EXPECT_EQ(resting(), 0);
}

TEST_F(Apart, AViewThatSomebodyKeepsHasItsValues) {
  const at::Tensor kept = storage_.resident(plane_, block(0));
  fill(kept, 3);
  storage_.discard(plane_, block(0));
  storage_.resident(plane_, block(0)).fill_(0);
  EXPECT_TRUE(holds(kept, 3));
}

TEST_F(Apart, ACopyElsewhereIsOfWhatIsThere) {
  fill(storage_.resident(plane_, block(0)), 0);
  EXPECT_TRUE(plane_holds(storage_, plane_, block(0), 0, Medium::kHost));
  storage_.prefetch(plane_, block(1), Medium::kFile);  // there is nothing to fetch
  EXPECT_FALSE(storage_.has_memory(plane_, block(1)));
  EXPECT_EQ(storage_.acquire(plane_, block(1), Access::kRead, Medium::kHost).data().cpu().sum().item<float>(), 0);
}

TEST_F(Apart, AMoveTakesTheBlocksThatAreThere) {
  const io::Folder folder;
  fill(storage_.resident(plane_, block(1)), 1);
  storage_.move(plane_, at_rest(Medium::kHost));
  EXPECT_EQ(storage_.usage()[0].resting, 0);
  EXPECT_EQ(storage_.usage()[1].resting, kBlockBytes);
  storage_.move(plane_, {});
  EXPECT_EQ(resting(), kBlockBytes);
  EXPECT_TRUE(holds(storage_.resident(plane_, block(1)), 1));
  // A file has all of them.
  storage_.move(plane_, at_rest(Medium::kFile, folder.path()));
  EXPECT_EQ(storage_.acquire(plane_, block(0), Access::kRead, Medium::kHost).data().cpu().sum().item<float>(), 0);
  storage_.move(plane_, {});
  EXPECT_TRUE(holds(storage_.resident(plane_, block(1)), 1));
  EXPECT_EQ(storage_.resident(plane_, block(2)).cpu().sum().item<float>(), 0);
}

TEST_F(Apart, ManyThreadsGetTheSameMemory) {
  for (int round = 0; round < 20; ++round) {
    std::vector<std::thread> threads;
    std::vector<void*> seen(4);
    for (size_t i = 0; i < seen.size(); ++i)
      threads.emplace_back([&, i] {
        storage_.occupy(plane_, block(1));
        seen[i] = storage_.resident(plane_, block(1)).data_ptr();
      });
    for (std::thread& thread : threads) thread.join();
    for (const void* address : seen) EXPECT_EQ(address, seen[0]);
    EXPECT_EQ(resting(), kBlockBytes);
    storage_.discard(plane_, block(1));
  }
}

TEST_F(Apart, MemoryOfOthersCannotLieApart) {
  PlaneExtras extras;
  extras.apart = true;
  extras.memory = at::zeros({4}, at::TensorOptions().device(test_device()));
  EXPECT_ANY_THROW(storage_.add("gradients", 4, at::kFloat, {}, {4}, extras));
}

}  // namespace
}  // namespace ds::storage

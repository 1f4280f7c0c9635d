// Streams wait for each other where memory of a device goes from one to another. On the stand-in device each of these
// waits is left out once, and the omission has to be reported (test_device.h).
#include <ATen/Functions.h>

#include "../test_device.h"
#include "planes.h"
#include "storage/alignment.h"
#include "storage/scratch_pool.h"
#include "storage/side_stream.h"

namespace ds::storage {
namespace {

using Unmissed = std::vector<std::string>;

constexpr int64_t kNumel = 2000;

at::TensorOptions floats() { return at::TensorOptions().device(test_device()); }

at::Tensor numbers(float first) {
  at::Tensor made = at::empty({kNumel}, floats());
  fill(made, first);
  return made;
}

// Two blocks of a plane, the first in host memory: a lease of both is a copy, and one of the second is a view.
Placement mixed() { return at_rest(Medium::kHost, "", 0.5); }
const Cuts kHalves = {kNumel / 2, kNumel};
const plan::Range kWhole{0, kNumel}, kView{kNumel / 2, kNumel};

const std::vector<StandinWait> kWaits = {kStandinStreamWait};

TEST(Streams, ABufferThatGoesToAnotherStreamWaitsForTheOneItWasGivenBackOn) {
  const auto body = [](bool sound) {
    ScratchPool pool;
    at::Tensor result;
    pool.give(numbers(1));
    {
      const SideStream side(test_device());
      at::Tensor taken = pool.take(kNumel, floats());
      fill(taken, 2);
      result = taken.add(0);
    }
    const at::Tensor other = numbers(3);  // takes the memory where nothing keeps it
    if (sound) {
      EXPECT_TRUE(holds(other, 3));
    }
  };
  // The first one is for the stream on which the memory was made, whose order torch's allocator keeps by itself.
  EXPECT_EQ(waits_that_nothing_misses(body), on_standin() ? Unmissed{"kept memory 1"} : Unmissed{});
}

TEST(Streams, AViewOnAnotherStreamWaitsForTheLastUsers) {
  const auto body = [](bool sound) {
    ShardStorage storage(test_device());
    const PlaneId plane = storage.add("x", kNumel, at::kFloat, {});
    fill(storage.acquire(plane, kWhole, Access::kWrite, Medium::kDevice).data(), 1);
    at::Tensor copy;
    {
      const SideStream side(test_device());
      copy = storage.acquire(plane, kWhole, Access::kRead, Medium::kDevice).data().add(0);
      if (sound) {
        EXPECT_TRUE(holds(copy, 1));
      }
    }
    const Lease lease = storage.acquire(plane, kWhole, Access::kWrite, Medium::kDevice);
    fill(lease.data(), 2);
    if (sound) {
      EXPECT_TRUE(holds(lease.data(), 2));
    }
  };
  EXPECT_EQ(waits_that_nothing_misses(body, kWaits), Unmissed{});
}

// Blocks that lie apart: their memory is made on this stream, and another one uses it.
class ApartOnStreams : public ::testing::Test {
 protected:
  static PlaneId add(ShardStorage& storage) {
    PlaneExtras extras;
    extras.apart = true;
    return storage.add("x", 2 * kNumel, at::kFloat, {}, {kNumel, 2 * kNumel}, extras);
  }
};

TEST_F(ApartOnStreams, ALeaseWaitsForTheStreamThatMadeTheMemory) {
  const auto body = [](bool sound) {
    ShardStorage storage(test_device());
    const PlaneId plane = add(storage);
    fill(storage.resident(plane, {kNumel, 2 * kNumel}), 1);
    const SideStream side(test_device());
    const Lease lease = storage.acquire(plane, {0, 2 * kNumel}, Access::kUpdate, Medium::kDevice);
    const at::Tensor copy = lease.pieces().at(0).data.add(0);
    if (sound) {
      EXPECT_TRUE(holds(copy, 1));
    }
  };
  EXPECT_EQ(waits_that_nothing_misses(body, kWaits), Unmissed{});
}

TEST_F(ApartOnStreams, MemoryIsReusedBehindTheLastLeaseOfSeveralBlocks) {
  const auto body = [](bool sound) {
    ShardStorage storage(test_device());
    const PlaneId plane = add(storage);
    storage.occupy(plane, {0, 2 * kNumel});
    {
      const SideStream side(test_device());
      const Lease lease = storage.acquire(plane, {0, 2 * kNumel}, Access::kUpdate, Medium::kDevice);
      for (const Lease::Piece& piece : lease.pieces()) fill(piece.data, 1);
    }
    const Lease lease = storage.acquire(plane, {0, 2 * kNumel}, Access::kUpdate, Medium::kDevice);
    for (const Lease::Piece& piece : lease.pieces()) {
      piece.data.add_(1);
      if (sound) {
        EXPECT_TRUE(holds(piece.data, 2));
      }
    }
  };
  // Both blocks were made on one stream, and are given back by one.
  const Unmissed twice = {"stream wait 1", "stream wait 2", "stream wait 3", "stream wait 4"};
  EXPECT_EQ(waits_that_nothing_misses(body, kWaits), on_standin() ? twice : Unmissed{});
}

TEST_F(ApartOnStreams, DiscardedMemoryIsReusedBehindTheStreamOfTheDiscard) {
  const auto body = [](bool sound) {
    ShardStorage storage(test_device());
    const PlaneId plane = add(storage);
    at::Tensor view = storage.resident(plane, {0, kNumel});
    c10::impl::VirtualGuardImpl device(test_device().type());
    const c10::Stream made = device.getStream(test_device());
    {
      const SideStream side(test_device());
      if (on_standin()) {
        c10::Event ordered(test_device().type());  // whoever uses a view on another stream sees to that
        ordered.record(made);
        ordered.block(device.getStream(test_device()));
      }
      fill(view, 1);
      view.reset();
      storage.discard(plane, {0, kNumel});
    }
    const at::Tensor other = numbers(3);  // takes the memory where nothing keeps it
    if (sound) {
      EXPECT_TRUE(holds(other, 3));
    }
  };
  EXPECT_EQ(waits_that_nothing_misses(body, {kStandinKeptMemory}), Unmissed{});
}

// The block on the host comes and goes while the host waits, the one on the device without.
TEST(Streams, ACopyOfTwoMemoriesIsWrittenBackBehindItsUser) {
  const auto body = [](bool sound) {
    ShardStorage storage(test_device());
    const PlaneId plane = storage.add("x", kNumel, at::kFloat, mixed(), kHalves);
    fill(storage.acquire(plane, kWhole, Access::kWrite, Medium::kDevice).data(), 1);
    storage.settle();
    const Lease lease = storage.acquire(plane, kView, Access::kUpdate, Medium::kDevice);
    lease.data().add_(1);
    if (sound) {
      EXPECT_TRUE(holds(lease.data(), 2 + kNumel / 2));
    }
  };
  // The first waits for the stream that made the plane's memory, which here is the one of the lease, for which the
  // second waits; the third waits for that again, for the other block.
  const Unmissed repeated = {"stream wait 1", "stream wait 3"};
  EXPECT_EQ(waits_that_nothing_misses(body, kWaits), on_standin() ? repeated : Unmissed{});
}

TEST(Streams, APrefetchedCopyIsReadWhenItIsThere) {
  const auto body = [](bool sound) {
    ShardStorage storage(test_device());
    const PlaneId plane = storage.add("x", kNumel, at::kFloat, mixed(), kHalves);
    fill(storage.acquire(plane, {0, kNumel / 2}, Access::kWrite, Medium::kHost).data(), 1);
    fill(storage.acquire(plane, kView, Access::kWrite, Medium::kDevice).data(), 1 + kNumel / 2);
    storage.prefetch(plane, kWhole, Medium::kDevice);
    storage.settle();
    const Lease lease = storage.acquire(plane, kWhole, Access::kRead, Medium::kDevice);
    const at::Tensor copy = lease.data().add(0);
    if (sound) {
      EXPECT_TRUE(holds(copy, 1));
    }
  };
  EXPECT_EQ(waits_that_nothing_misses(body, kWaits), Unmissed{});
}

// Its memory may be somebody else's at once.
TEST(Streams, APrefetchedCopyThatNobodyTakesIsDroppedWithItsPlane) {
  const auto body = [](bool sound) {
    ShardStorage storage(test_device());
    const PlaneId plane = storage.add("x", kNumel, at::kFloat, mixed(), kHalves);
    fill(storage.acquire(plane, kView, Access::kWrite, Medium::kDevice).data(), 1);
    storage.prefetch(plane, kWhole, Medium::kDevice);
    storage.settle();
    storage.remove(plane);
    const Lease scratch = storage.scratch(copy_bytes(4 * kNumel) / 4, at::kFloat, Medium::kDevice);
    fill(scratch.data(), 2);
    if (sound) {
      EXPECT_TRUE(holds(scratch.data(), 2));
    }
  };
  EXPECT_EQ(waits_that_nothing_misses(body, kWaits), Unmissed{});
}

// A lease copies a block on its own stream while another stream wants to change the block.
TEST(Streams, ABlockThatIsBeingCopiedIsNotChanged) {
  const auto body = [](bool sound) {
    ShardStorage storage(test_device());
    const PlaneId plane = storage.add("x", kNumel, at::kFloat, mixed(), kHalves);
    fill(storage.acquire(plane, kView, Access::kWrite, Medium::kDevice).data(), 1);
    {
      const SideStream side(test_device());
      storage.acquire(plane, kWhole, Access::kRead, Medium::kDevice);
    }
    const Lease lease = storage.acquire(plane, kView, Access::kWrite, Medium::kDevice);
    fill(lease.data(), 2);
    if (sound) {
      EXPECT_TRUE(holds(lease.data(), 2));
    }
  };
  EXPECT_EQ(waits_that_nothing_misses(body, kWaits), Unmissed{});
}

}  // namespace
}  // namespace ds::storage

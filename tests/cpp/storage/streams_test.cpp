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

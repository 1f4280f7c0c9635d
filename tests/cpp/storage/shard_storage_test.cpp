#include "storage/shard_storage.h"

#include <ATen/Functions.h>

#include <chrono>
#include <functional>
#include <future>

#include "../error_of.h"
#include "planes.h"

namespace ds::storage {
namespace {

using namespace std::chrono_literals;
const c10::Device kDevice = test_device();
const c10::Device kCpu(at::kCPU);

struct Tiers : testing::TestWithParam<Medium> {
  const io::Folder folder;
  ShardStorage storage{kDevice};
  PlaneId add(int64_t numel, Cuts cuts = {}, at::ScalarType type = at::kFloat) {
    return storage.add("masters/a", numel, type, at_rest(GetParam(), folder.path()), std::move(cuts));
  }
};

TEST_P(Tiers, WhatIsWrittenIsReadAnywhere) {
  const PlaneId plane = add(10000, {1, 5000, 5001, 10000});
  for (const Medium at : {Medium::kDevice, Medium::kHost}) {
    const float first = at == Medium::kHost ? 7.0f : 1.0f;
    for (const plan::Range range : {plan::Range{0, 5000}, {5000, 5001}, {5001, 10000}}) {
      const Lease lease = storage.acquire(plane, range, Access::kWrite, at);
      ASSERT_EQ(lease.data().numel(), range.numel());
      fill(lease.data(), first + static_cast<float>(range.begin));
    }
    {
      const Lease lease = storage.acquire(plane, {4998, 5003}, Access::kUpdate, at);
      EXPECT_TRUE(holds(lease.data(), first + 4998));
      fill(lease.data(), first + 104998);
    }
    {  // a part of blocks: the rest of them stays
      const Lease lease = storage.acquire(plane, {4998, 5003}, Access::kWrite, at);
      fill(lease.data(), first + 4998);
    }
    for (const Medium reader : {Medium::kDevice, Medium::kHost}) {
      const Lease whole = storage.acquire(plane, {0, 10000}, Access::kRead, reader);
      EXPECT_TRUE(holds(whole.data(), first));
      const Lease odd = storage.acquire(plane, {4999, 5002}, Access::kRead, reader);
      EXPECT_TRUE(holds(odd.data(), first + 4999));
      EXPECT_EQ(storage.acquire(plane, {3, 3}, Access::kRead, reader).data().numel(), 0);
    }
  }
  storage.settle();
  EXPECT_EQ(storage.usage().leases, 0);
  for (const MediumUsage& medium : storage.usage().media) EXPECT_EQ(medium.staged, 0) << medium.name;
}

TEST_P(Tiers, EveryTypeAndSize) {
  for (const at::ScalarType type : {at::kByte, at::kHalf, at::kFloat, at::kDouble}) {
    for (const int64_t numel : {0, 1, 4095, 4097, 100003}) {
      const PlaneId plane = add(numel, {}, type);
      const at::Tensor values = at::arange(numel, at::kLong).remainder(251).to(type);
      storage.acquire(plane, {0, numel}, Access::kWrite, Medium::kHost).data().copy_(values);
      const Lease lease = storage.acquire(plane, {0, numel}, Access::kRead, Medium::kDevice);
      EXPECT_EQ(lease.data().scalar_type(), type);
      EXPECT_TRUE(lease.data().cpu().equal(values)) << numel;
    }
  }
}

TEST_P(Tiers, MovesKeepContents) {
  const PlaneId plane = add(9000, {4000, 4096, 9000});
  write_plane(storage, plane, {0, 9000}, 3);
  for (const Medium rest :
       {Medium::kHost, Medium::kFile, Medium::kDevice, Medium::kFile, Medium::kHost, Medium::kHost}) {
    for (const double share : {1.0, 0.45, 0.0}) {
      storage.move(plane, at_rest(rest, folder.path(), share));
      EXPECT_EQ(storage.placement(plane).rest, rest);
      EXPECT_TRUE(plane_holds(storage, plane, {0, 9000}, 3, Medium::kDevice));
      const Usage usage = storage.usage();
      int64_t resting = 0;
      for (const MediumUsage& medium : usage.media) resting += medium.resting;
      EXPECT_EQ(resting, 36000);
      if (rest != Medium::kDevice) {
        const int64_t there = share == 1.0 ? 36000 : share == 0.0 ? 0 : 16000;
        EXPECT_EQ(usage[static_cast<size_t>(rest)].resting, there);
      }
      EXPECT_EQ(folder.entries(), rest == Medium::kFile && share > 0 ? 1u : 0u);
    }
  }
  storage.remove(plane);
  EXPECT_EQ(folder.entries(), 0u);
  EXPECT_THROW(storage.acquire(plane, {0, 1}, Access::kRead, Medium::kHost), Error);
}

TEST_P(Tiers, PrefetchIsAHint) {
  const PlaneId plane = add(8192, {4096, 8192});
  write_plane(storage, plane, {0, 8192}, 0);
  storage.settle();
  const Medium at = GetParam() == Medium::kDevice ? Medium::kHost : Medium::kDevice;
  storage.prefetch(plane, {0, 4096}, at);
  storage.prefetch(plane, {0, 4096}, at);
  storage.prefetch(plane, {4096, 8192}, at);
  fill(storage.acquire(plane, {0, 4096}, Access::kUpdate, at).data(), 0);
  EXPECT_EQ(storage.usage().prefetch_hits, 1);
  // Somebody changes the second one, elsewhere: what was prefetched is not what is there.
  fill(storage.acquire(plane, {5000, 5010}, Access::kUpdate, GetParam() == Medium::kHost ? Medium::kHost : at).data(),
       1);
  EXPECT_TRUE(plane_holds(storage, plane, {5000, 5010}, 1, at));
  EXPECT_TRUE(plane_holds(storage, plane, {5010, 8192}, 5010, at));
  storage.settle();
  const Usage usage = storage.usage();
  EXPECT_EQ(usage.prefetches, 2);
  EXPECT_EQ(usage.prefetch_hits + usage.prefetch_drops, 2);
}

INSTANTIATE_TEST_SUITE_P(ShardStorage, Tiers, testing::ValuesIn(kMedia), [](const auto& info) {
  return std::string(info.param == Medium::kDevice ? "Device" : info.param == Medium::kHost ? "Host" : "File");
});

TEST(ShardStorage, AResidentLeaseIsTheMemoryItself) {
  ShardStorage storage(kDevice);
  const at::Tensor mine = at::zeros({100}, kDevice);
  const PlaneId plane = storage.add("grad", 100, at::kFloat, {}, {10, 100}, mine);
  const Lease lease = storage.acquire(plane, {5, 95}, Access::kUpdate, Medium::kDevice);
  EXPECT_EQ(lease.data().data_ptr<float>(), mine.data_ptr<float>() + 5);
  EXPECT_EQ(storage.resident(plane).data_ptr<float>(), mine.data_ptr<float>());
  EXPECT_EQ(storage.usage()[0].staged, 0);
}

TEST(ShardStorage, ALastingViewOutlivesMoves) {
  ShardStorage storage(kDevice);
  const io::Folder folder;
  const at::Tensor mine = at::empty({5000}, kDevice);
  fill(mine, 2);
  const at::Tensor view = mine.narrow(0, 100, 10);
  const PlaneId adopted = storage.add("masters", 5000, at::kFloat, {}, {}, mine);
  const PlaneId own = storage.add("slots", 300, at::kFloat, {});
  const at::Tensor lasting = storage.resident(own);
  fill(lasting, 9);
  for (const Medium rest : {Medium::kHost, Medium::kFile}) {
    storage.move({own, adopted, own}, at_rest(rest, folder.path()));
    EXPECT_EQ(mine.storage().nbytes(), 0u);
    EXPECT_EQ(lasting.storage().nbytes(), 0u);
    EXPECT_EQ(storage.usage()[0].resting, 0);
    EXPECT_NE(error_of([&] { storage.resident(own); }), "no error");
    EXPECT_TRUE(plane_holds(storage, own, {0, 300}, 9, Medium::kDevice));
    storage.move({own, adopted}, at_rest(Medium::kDevice));
    storage.move(own, at_rest(Medium::kDevice));  // is there
    EXPECT_TRUE(holds(view, 102));
    EXPECT_TRUE(holds(lasting, 9));
    EXPECT_TRUE(holds(storage.resident(adopted), 2));
    EXPECT_EQ(storage.usage()[0].resting, 5300 * 4);
  }
  const at::Tensor large = at::zeros({100}, kDevice);
  const PlaneId part = storage.add("part", 50, at::kFloat, {}, {}, large.narrow(0, 0, 50));
  EXPECT_TRUE(says(error_of([&] { storage.move(part, at_rest(Medium::kHost)); }), "'part' cannot move"));
  EXPECT_EQ(large.storage().nbytes(), 400u);
  storage.remove(adopted);
  EXPECT_TRUE(holds(mine, 2));
}

TEST(ShardStorage, WhoChangesWaitsForWhoReads) {
  ShardStorage storage(kDevice);
  const PlaneId plane = storage.add("masters", 100, at::kFloat, at_rest(Medium::kHost), {50, 100});
  const auto later = [&](Access access, plan::Range range, Medium at) {
    return std::async(std::launch::async, [&storage, plane, access, range, at] {
      const Lease lease = storage.acquire(plane, range, access, at);
    });
  };
  for (const Medium at : {Medium::kDevice, Medium::kHost}) {
    Lease reading = storage.acquire(plane, {0, 10}, Access::kRead, at);
    storage.acquire(plane, {5, 15}, Access::kRead, at);     // others may read
    storage.acquire(plane, {50, 60}, Access::kUpdate, at);  // and change another block
    auto writer = later(Access::kUpdate, {49, 50}, at);     // of the same block
    auto mover = std::async(std::launch::async, [&] { storage.move(plane, at_rest(Medium::kHost)); });
    EXPECT_EQ(writer.wait_for(20ms), std::future_status::timeout);
    EXPECT_EQ(mover.wait_for(0ms), std::future_status::timeout);
    // A background save ends in another thread than it began in.
    std::thread([&, lease = std::move(reading)]() mutable { lease.release(); }).join();
    writer.get();
    mover.get();
    Lease writing = storage.acquire(plane, {0, 1}, Access::kWrite, at);
    auto reader = later(Access::kRead, {0, 100}, at);
    EXPECT_EQ(reader.wait_for(20ms), std::future_status::timeout);
    writing.release();
    reader.get();
  }
}

TEST(ShardStorage, ALeaseMayOutliveTheStorage) {
  const io::Folder folder;
  Lease lease, scratch;
  {
    ShardStorage storage(kDevice);
    const PlaneId plane = storage.add("x", 100, at::kFloat, at_rest(Medium::kFile, folder.path()));
    lease = storage.acquire(plane, {0, 100}, Access::kWrite, Medium::kHost);
    scratch = storage.scratch(10, at::kHalf, Medium::kDevice);
  }
  fill(lease.data(), 1);
  EXPECT_EQ(scratch.data().numel(), 10);
  Lease other = std::move(lease);
  EXPECT_FALSE(lease);  // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(other);
  scratch.release();
  other.release();
  EXPECT_EQ(folder.entries(), 0u);
}

TEST(ShardStorage, ATensorMayHoldALease) {
  ShardStorage storage(kDevice);
  at::Tensor held = as_tensor(storage.scratch(100, at::kFloat, Medium::kDevice));
  const void* memory = held.data_ptr();
  at::Tensor view = held.narrow(0, 10, 5).view({5, 1});
  held.reset();
  view.fill_(1);
  EXPECT_EQ(storage.usage()[0].scratch, 400);
  view.reset();
  EXPECT_EQ(storage.usage()[0].scratch, 0);
  EXPECT_EQ(storage.usage()[0].peak_scratch, 400);
  EXPECT_EQ(storage.scratch(200, at::kHalf, Medium::kDevice).data().data_ptr(), memory);
}

TEST(ShardStorage, ScratchIsReusedBoundedAndTrimmed) {
  ShardStorage storage(kDevice);
  const auto idle = [&] { return storage.usage()[0].idle; };
  std::vector<Lease> leases;
  for (int i = 0; i < 5; ++i) leases.push_back(storage.scratch(1000, at::kFloat, Medium::kDevice));
  const void* last = leases.back().data().data_ptr();
  EXPECT_EQ(storage.usage()[0].scratch, 20000);
  leases.clear();
  EXPECT_EQ(storage.usage()[0].scratch, 0);
  EXPECT_EQ(idle(), 8000);                                          // the largest one twice
  Lease again = storage.scratch(2000, at::kHalf, Medium::kDevice);  // as many bytes
  EXPECT_EQ(again.data().data_ptr(), last);
  EXPECT_EQ(again.data().scalar_type(), at::kHalf);
  EXPECT_EQ(idle(), 4000);
  again.release();
  storage.keep_scratch(Medium::kDevice, 50000);
  for (int i = 0; i < 5; ++i) leases.push_back(storage.scratch(1000, at::kFloat, Medium::kDevice));
  leases.clear();
  EXPECT_EQ(idle(), 20000);
  storage.trim();
  EXPECT_EQ(idle(), 0);
  EXPECT_EQ(storage.scratch(0, at::kFloat, Medium::kHost).data().numel(), 0);
}

TEST(ShardStorage, ABudgetWaitsForTransfersAndNeverForEver) {
  const io::Folder folder;
  Budget budget;
  budget.bytes[Medium::kHost] = 100000;
  ShardStorage storage(kCpu, budget);
  const PlaneId plane = storage.add("x", 160000, at::kFloat, at_rest(Medium::kFile, folder.path()),
                                    {20000, 40000, 60000, 80000, 100000, 120000, 140000, 160000});
  const auto part = [](int64_t i) { return plan::Range{20000 * i, 20000 * (i + 1)}; };
  for (int64_t i = 0; i < 8; ++i) {
    write_plane(storage, plane, part(i), static_cast<float>(20000 * i));
  }
  storage.settle();
  Usage usage = storage.usage();
  EXPECT_EQ(usage[1].over_budget, 0);  // each waits for the write back of the one before
  EXPECT_LE(usage[1].peak, 100000);
  EXPECT_GT(usage.budget_waits, 0);
  {
    const Lease first = storage.acquire(plane, part(0), Access::kRead, Medium::kHost);
    storage.prefetch(plane, part(1), Medium::kHost);  // no room: dropped
    EXPECT_EQ(storage.usage().prefetch_drops, 1);
    const Lease second = storage.acquire(plane, part(1), Access::kRead, Medium::kHost);  // nothing ends by itself
    EXPECT_TRUE(holds(second.data(), 20000));
    EXPECT_EQ(storage.usage()[1].over_budget, 1);
    EXPECT_GT(storage.usage()[1].peak, 160000);
  }
  EXPECT_LE(storage.usage()[1].total(), 100000);  // what came back did not stay
  // Idle scratch and what was prefetched in vain go for a lease.
  storage.prefetch(plane, part(2), Medium::kHost);
  storage.settle();
  EXPECT_TRUE(plane_holds(storage, plane, part(3), 60000));
  EXPECT_EQ(storage.usage()[1].over_budget, 1);
  EXPECT_EQ(storage.usage().prefetch_drops, 2);
  EXPECT_TRUE(storage.has_room(Medium::kDevice, 1 << 30));  // no limit
  storage.trim();
  const Lease taken = storage.scratch(10000, at::kFloat, Medium::kHost);
  const MediumUsage host = storage.usage()[1];
  EXPECT_TRUE(storage.has_room(Medium::kHost, 100000 - host.total()));
  EXPECT_FALSE(storage.has_room(Medium::kHost, 100000 - host.total() + 1));

  budget.bytes[Medium::kHost] = -1;
  EXPECT_THROW(ShardStorage(kCpu, budget), Error);
}

TEST(ShardStorage, PinnedMemoryThatCannotBeHadIsReported) {
  ShardStorage storage(kCpu);
  Placement placement = at_rest(Medium::kHost);
  placement.pinned = true;
  const PlaneId plane = storage.add("x", 100, at::kFloat, placement);
  write_plane(storage, plane, {0, 100}, 1);
  const Usage usage = storage.usage();
  if (storage.resident(storage.add("y", 1, at::kFloat, placement)).is_pinned()) GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(usage.unpinned_bytes, 400);
  EXPECT_NE(usage.unpinned_reason, "");
}

TEST(ShardStorage, ErrorsNameThePlane) {
  ShardStorage storage(kCpu);
  const PlaneId plane = storage.add("masters.fp32", 10, at::kFloat, {}, {3, 10});
  const auto told = [](const std::function<void()>& call, const std::string& expected) {
    EXPECT_TRUE(says(error_of(call), expected));
  };
  told(
      [&] {
        storage.acquire(plane, {3, 11}, Access::kRead, Medium::kHost);
      },
      "plane 'masters.fp32' has 10 elements; [3, 11) is not among them");
  told([&] { storage.acquire(plane, {0, 3}, Access::kRead, Medium::kFile); }, "nobody can work in the tier 'file'");
  told([&] { storage.acquire(plane, {0, 3}, Access::kRead, static_cast<Medium>(77)); }, "there is no tier 77");
  told([&] { storage.add("a", 10, at::kFloat, {}, {3, 3, 10}); }, "plane 'a': cuts must rise, and 3 comes after 3");
  told([&] { storage.add("a", 10, at::kFloat, {}, {3, 9}); }, "plane 'a' has 10 elements, and its last cut is at 9");
  told([&] { storage.add("a", 10, at::kFloat, at_rest(Medium::kFile)); }, "plane 'a' is to rest in a file");
  told([&] { storage.add("a", 10, at::kFloat, at_rest(Medium::kFile, "/no/such")); },
       "/no/such failed: No such file or directory");
  told([&] { storage.add("a", 10, at::kFloat, at_rest(Medium::kHost), {}, at::zeros({10})); }, "brings memory along");
  told([&] { storage.acquire({5}, {0, 1}, Access::kRead, Medium::kHost); }, "there is no plane 5");
  Placement share;
  share.host_share = 1.5;
  told([&] { storage.add("a", 10, at::kFloat, share); }, "a share is from 0 to 1, not 1.5");
  EXPECT_EQ(storage.usage().leases, 0);
  storage.acquire(plane, {0, 10}, Access::kUpdate, Medium::kDevice);  // nothing is held after an error
}

}  // namespace
}  // namespace ds::storage

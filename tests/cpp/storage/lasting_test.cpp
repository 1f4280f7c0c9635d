// Views that last: of the parts of a plane that rests in two memories, over moves; and what is counted on the way.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "planes.h"

namespace ds::storage {
namespace {

TEST(Lasting, ViewsOfPartsComeBackWithTheirContents) {
  const io::Folder folder;
  ShardStorage storage(test_device());
  const Placement half = at_rest(Medium::kHost, "", 0.5);
  const PlaneId plane = storage.add("states", 8, at::kFloat, half, {2, 4, 8});
  const at::Tensor first = storage.resident(plane, {0, 4}), second = storage.resident(plane, {4, 8});
  const at::Tensor inside = storage.resident(plane, {5, 7});
  first.copy_(at::arange(4, at::kFloat));
  second.copy_(at::arange(4, 8, at::kFloat));
  EXPECT_TRUE(at::equal(inside.cpu(), at::arange(5, 7, at::kFloat)));
  EXPECT_TRUE(inside.is_alias_of(second));
  for (const Placement& away : {at_rest(Medium::kHost), at_rest(Medium::kFile, folder.path())}) {
    storage.move(plane, away);
    EXPECT_EQ(first.storage().nbytes(), 0u);
    EXPECT_EQ(second.storage().nbytes(), 0u);
    {
      const Lease lease = storage.acquire(plane, {0, 8}, Access::kUpdate, Medium::kHost);
      lease.data().add_(1);
    }
    storage.move(plane, half);
  }
  EXPECT_TRUE(at::equal(first.cpu(), at::arange(2, 6, at::kFloat)));
  EXPECT_TRUE(at::equal(inside.cpu(), at::arange(7, 9, at::kFloat)));
  EXPECT_EQ(folder.entries(), 0u);
}

TEST(Lasting, ARangeOfTwoPartsHasNoView) {
  ShardStorage storage(c10::Device(at::kCPU));
  const PlaneId plane = storage.add("states", 8, at::kFloat, at_rest(Medium::kHost, "", 0.5), {4, 8});
  EXPECT_ANY_THROW(storage.resident(plane));
  EXPECT_ANY_THROW(storage.resident(plane, {3, 5}));
}

TEST(Lasting, AWaitForALeaseIsATimeOfTheStep) {
  ShardStorage storage(c10::Device(at::kCPU));
  const PlaneId plane = storage.add("states", 16, at::kFloat, at_rest(Medium::kHost));
  storage.clock()->turn(true);
  const InPhase step(*storage.clock(), Phase::kOptimizer);
  const auto waited = [&] { return storage.clock()->totals().all[static_cast<size_t>(Phase::kOffload)]; };
  { storage.acquire(plane, {0, 16}, Access::kRead, Medium::kHost); }
  EXPECT_EQ(waited(), 0);
  auto held = std::make_unique<Lease>(storage.acquire(plane, {0, 16}, Access::kWrite, Medium::kHost));
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(400));  // a busy machine may hold either thread up
    held.reset();
  });
  { storage.acquire(plane, {0, 16}, Access::kRead, Medium::kHost); }
  other.join();
  EXPECT_GE(waited(), 200'000'000);
  EXPECT_NEAR(static_cast<double>(waited()) * 1e-9, storage.usage()[1].waited_seconds, 0.05);
}

TEST(Lasting, CopiesAreRecordedWhileSomebodyWantsThem) {
  const io::Folder folder;
  ShardStorage storage(c10::Device(at::kCPU));
  const PlaneId plane = storage.add("states", 1024, at::kFloat, at_rest(Medium::kFile, folder.path()));
  const auto write = [&] {
    storage.acquire(plane, {0, 1024}, Access::kWrite, Medium::kHost).data().fill_(1);
    storage.settle();
  };
  write();
  EXPECT_TRUE(storage.take_copies().empty());
  storage.record_copies(true);
  write();
  storage.acquire(plane, {0, 1024}, Access::kRead, Medium::kHost);
  const auto copies = storage.take_copies();
  ASSERT_EQ(copies.size(), 2u);
  EXPECT_FALSE(copies[0].read);
  EXPECT_TRUE(copies[1].read);
  for (const CopyRecord& copy : copies) {
    EXPECT_EQ(copy.plane, "states");
    EXPECT_EQ(copy.medium, "file");
    EXPECT_EQ(copy.bytes, 4096);
    EXPECT_LT(copy.begin, copy.end);
  }
  storage.record_copies(false);
  write();
  EXPECT_TRUE(storage.take_copies().empty());
}

TEST(Lasting, CopiesAreCounted) {
  const io::Folder folder;
  ShardStorage storage(c10::Device(at::kCPU));
  const PlaneId plane = storage.add("states", 1024, at::kFloat, at_rest(Medium::kFile, folder.path()));
  storage.acquire(plane, {0, 1024}, Access::kWrite, Medium::kHost).data().fill_(1);
  storage.settle();
  storage.acquire(plane, {0, 1024}, Access::kRead, Medium::kHost);
  const MediumUsage file = storage.usage()[2];
  EXPECT_EQ(file.written_bytes, 4096);
  EXPECT_EQ(file.read_bytes, 4096);
  EXPECT_GT(file.read_seconds, 0);
  EXPECT_GE(file.waited_seconds, 0);
  EXPECT_EQ(storage.usage()[1].read_bytes, 0);
  // A view copies nothing. A limit may come later.
  const PlaneId here = storage.add("masters", 16, at::kFloat, at_rest(Medium::kHost));
  storage.acquire(here, {0, 16}, Access::kUpdate, Medium::kHost).data().zero_();
  EXPECT_EQ(storage.usage()[1].written_bytes, 0);
  storage.trim();
  storage.limit(Medium::kHost, 64);
  storage.acquire(plane, {0, 1024}, Access::kRead, Medium::kHost);
  EXPECT_GT(storage.usage()[1].over_budget, 0);
  storage.at_exit();
  EXPECT_EQ(folder.entries(), 0u);
}

}  // namespace
}  // namespace ds::storage

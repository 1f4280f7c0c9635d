// Bytes of tensors without memory, and memory tiers that count.
#include "storage/meta_memory.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "storage/shard_storage.h"

namespace ds::storage {
namespace {

at::Tensor meta(int64_t elements) {
  return at::empty({elements}, at::TensorOptions().device(at::kMeta).dtype(at::kFloat));
}

TEST(MetaMemory, CountsEveryStorageUntilItIsReleased) {
  const at::Tensor before = meta(1000);
  MetaMemory memory;
  memory.install();
  at::Tensor kept;
  {
    const at::Tensor made = meta(6), view = before.view({10, 100});
    kept = made.view({2, 3});
    EXPECT_EQ(memory.live(), 24);
    const at::Tensor other = meta(100), on_host = at::ones({5});
    EXPECT_EQ(memory.live(), 424);
  }
  EXPECT_EQ(memory.live(), 24);
  EXPECT_EQ(memory.peak(), 424);
  memory.reset_peak();
  EXPECT_EQ(memory.peak(), 24);
  memory.remove();
  const at::Tensor later = meta(7);
  EXPECT_EQ(memory.live(), 24);
  kept.reset();
  EXPECT_EQ(memory.live(), 0);
}

TEST(MetaMemory, TensorsMayOutliveItAndCountsNest) {
  at::Tensor first, second;
  {
    MetaMemory outer;
    outer.install();
    first = meta(6);
    {
      MetaMemory inner(512);
      inner.install();
      EXPECT_EQ(MetaMemory::installed(), &inner);
      second = meta(6);
      EXPECT_EQ(inner.live(), 512);
    }
    EXPECT_EQ(MetaMemory::installed(), &outer);
    EXPECT_EQ(outer.live(), 24);
  }
  EXPECT_EQ(MetaMemory::installed(), nullptr);
}

TEST(MetaMemory, AddressesAreUnique) {
  MetaMemory memory;
  memory.install();
  const at::Tensor a = meta(6), b = meta(6);
  EXPECT_NE(a.data_ptr(), b.data_ptr());
  const at::Tensor whole = meta(128), next = meta(128);  // 512 bytes each
  EXPECT_GT(static_cast<char*>(next.data_ptr()), static_cast<char*>(whole.data_ptr()) + 512);
  EXPECT_EQ(static_cast<char*>(a.narrow(0, 2, 2).data_ptr()) - static_cast<char*>(a.data_ptr()), 8);
}

TEST(MetaMemory, BytesHaveOwnersAtThePeakOfEachMoment) {
  MetaMemory memory;
  memory.install();
  memory.set_owner("weights");
  const at::Tensor weights = meta(10);
  memory.set_moment("forward");
  memory.set_owner("activations");
  at::Tensor kept = meta(5);
  {
    const MetaOwner scope("scratch");
    const at::Tensor scratch = meta(100);
  }
  {
    const MetaOwner scope("");
    const at::Tensor elsewhere = meta(1000), result = meta(10);
    EXPECT_EQ(memory.live(), 60);
    memory.adopt(result, "activations");
    memory.adopt(weights, "activations");
    EXPECT_EQ(memory.live(), 100);
  }
  memory.set_moment("backward");
  kept.reset();
  const auto peaks = memory.peaks();
  EXPECT_EQ(peaks.at("forward"), (OwnedBytes{{"activations", 20}, {"scratch", 400}, {"weights", 40}}));
  EXPECT_EQ(peaks.at("backward"), (OwnedBytes{{"activations", 20}, {"scratch", 0}, {"weights", 40}}));
  EXPECT_EQ(memory.owned().at("activations"), 0);
}

TEST(MetaMemory, WhatIsAliveGoesToAnotherOwner) {
  MetaMemory memory;
  memory.install();
  memory.set_moment("forward");
  memory.set_owner("attention");
  at::Tensor first = meta(5), second = meta(7);
  const at::Tensor freed = second.view({7});
  memory.give_all("attention", "kept");
  const at::Tensor third = meta(2);
  EXPECT_EQ(memory.owned(), (OwnedBytes{{"attention", 8}, {"kept", 48}}));
  memory.give(second, "buffers");
  memory.give(second, "buffers");
  EXPECT_EQ(memory.owned(), (OwnedBytes{{"attention", 8}, {"buffers", 28}, {"kept", 20}}));
  EXPECT_EQ(memory.peak(), 56);
  first.reset();
  EXPECT_EQ(memory.owned().at("kept"), 0);
  memory.give(second, MetaMemory::kElsewhere);
  EXPECT_EQ(memory.live(), 8);
}

TEST(MetaMemory, SaysWhetherStepsAreThoseOfTheHost) {
  EXPECT_TRUE(in_host_memory(c10::Device(at::kCPU)));
  EXPECT_FALSE(in_host_memory(c10::Device(at::kMeta)));
  for (const bool on_host : {false, true}) {
    MetaMemory memory(1, on_host);
    memory.install();
    EXPECT_EQ(in_host_memory(c10::Device(at::kMeta)), on_host);
  }
}

TEST(CountedTiers, BlocksRestAndTravelWithoutMemory) {
  MetaMemory memory;
  memory.install();
  {
    ShardStorage storage{c10::Device(at::kMeta)};
    storage.add("master", 1000, at::kFloat, Placement{}, {400, 1000});
    Placement on_host, in_file;
    on_host.rest = Medium::kHost;
    in_file.rest = Medium::kFile;
    in_file.folder = "/this folder/does not exist";
    const PlaneId there = storage.add("slot0", 1000, at::kFloat, on_host, {400, 1000});
    const PlaneId further = storage.add("slot1", 1000, at::kFloat, in_file, {400, 1000});
    EXPECT_EQ(memory.live(), 4000);
    EXPECT_EQ(memory.owned().at("master"), 4000);
    for (const PlaneId plane : {there, further}) {
      const Lease lease = storage.acquire(plane, {0, 400}, Access::kUpdate, Medium::kDevice);
      EXPECT_TRUE(lease.data().is_meta());
      EXPECT_GE(memory.live(), 5600);
    }
    const auto idle_after_lease = [&](Medium at) {
      storage.acquire(at == Medium::kHost ? further : there, {0, 400}, Access::kUpdate, at).release();
      return storage.usage()[static_cast<size_t>(at)].idle;
    };
    for (const Medium at : {Medium::kDevice, Medium::kHost}) EXPECT_EQ(idle_after_lease(at), idle_after_lease(at));
    {  // the memory of the host never counts, and a copy is done when it is asked for
      const int64_t before = memory.live();
      const Lease on_host_lease = storage.acquire(there, {0, 400}, Access::kUpdate, Medium::kHost);
      memory.adopt(on_host_lease.data(), "engine");
      EXPECT_EQ(memory.live(), before);
      storage.prefetch(further, {400, 1000}, Medium::kDevice);
      EXPECT_TRUE(storage.here(further, {400, 1000}, Medium::kDevice));
    }
    storage.settle();
    const Usage usage = storage.usage();
    EXPECT_EQ(usage.media[1].resting, 4000);
    EXPECT_EQ(usage.media[2].resting, 4000);
    EXPECT_EQ(usage.media[2].read_bytes, 3 * 1600 + 2400);
    EXPECT_EQ(usage.media[2].written_bytes, 3 * 1600);
  }
  EXPECT_EQ(memory.live(), 0);
}

}  // namespace
}  // namespace ds::storage

// Memory of gathered parameters: how much of it is kept, and who waits for whom where there are streams. The device is
// a stand-in that writes down what it is asked to do.
#include "storage/scratch_pool.h"

#include <ATen/Functions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "storage/shard_storage.h"

namespace ds::storage {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

at::TensorOptions bytes() { return at::TensorOptions().dtype(at::kByte); }

TEST(ScratchPool, KeepsTwoUnitsOfTheLargestAndReturnsTheRest) {
  ScratchPool pool;
  std::vector<at::Tensor> whole;
  std::vector<WeakTensor> memory;
  for (int i = 0; i < 10; ++i) {
    whole.push_back(pool.take(100, bytes()));
    memory.emplace_back(whole.back().getIntrusivePtr());
  }
  for (at::Tensor& one : whole) pool.give(std::exchange(one, at::Tensor()));
  EXPECT_EQ(pool.idle_bytes(), 200);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(memory[i].expired(), i < 8) << i;  // the latest stay

  pool.keep_two_of(300);
  for (at::Tensor& one : whole) one = pool.take(100, bytes());
  for (at::Tensor& one : whole) pool.give(std::exchange(one, at::Tensor()));
  EXPECT_EQ(pool.idle_bytes(), 600);
  pool.trim();
  EXPECT_EQ(pool.idle_bytes(), 0);
}

TEST(ScratchPool, BuffersOfAnotherSizeMakeRoom) {
  ScratchPool pool;
  for (int64_t numel = 1; numel <= 64; ++numel) {
    std::vector<at::Tensor> taken = {pool.take(numel, bytes()), pool.take(numel, bytes())};
    for (at::Tensor& one : taken) pool.give(std::exchange(one, at::Tensor()));
    EXPECT_EQ(pool.idle_bytes(), 2 * numel);
  }
  const at::Tensor again = pool.take(64, bytes());
  EXPECT_EQ(pool.idle_bytes(), 64);
  EXPECT_EQ(again.numel(), 64);
}

struct Device {
  int64_t stream = 1;  // the current one
  std::vector<std::string> calls;
};
Device& device() {
  static Device one;
  return one;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device d) const override { return d; }
  c10::Device getDevice() const override { return {type(), 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, d, static_cast<c10::StreamId>(device().stream));
  }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    static int made = 0;
    if (!*event) *event = reinterpret_cast<void*>(static_cast<intptr_t>(++made));
    device().calls.push_back("record " + std::to_string(stream.id()));
  }
  void block(void*, const c10::Stream& stream) const override {
    device().calls.push_back("block " + std::to_string(stream.id()));
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device().calls.push_back((data.get() ? "keep " : "nothing ") + std::to_string(stream.id()));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TEST(ScratchPool, ABufferThatChangesStreamsWaitsForTheOneItWasGivenBackOn) {
  ScratchPool pool;
  std::vector<uint8_t> memory(64);
  const c10::Device fake(c10::DeviceType::PrivateUse1, 0);
  const auto calls = [] { return std::exchange(device().calls, {}); };
  using Calls = std::vector<std::string>;
  {
    const at::Tensor buffer =
        at::for_blob(memory.data(), {64}).options(bytes().device(fake)).target_device(fake).make_tensor();
    device().stream = 1;
    pool.give(buffer);
  }
  EXPECT_EQ(calls(), (Calls{"record 1", "keep 1"}));
  at::Tensor taken = pool.take(64, bytes().device(fake));
  EXPECT_EQ(taken.data_ptr(), memory.data());
  EXPECT_EQ(calls(), Calls{});  // the same stream is behind it anyway

  pool.give(std::exchange(taken, at::Tensor()));
  calls();
  device().stream = 2;
  taken = pool.take(64, bytes().device(fake));
  EXPECT_EQ(calls(), (Calls{"block 2", "keep 2"}));
  pool.give(std::exchange(taken, at::Tensor()));  // given back on the second one now
  EXPECT_EQ(calls(), (Calls{"record 2", "keep 2"}));
  device().stream = 1;
  taken = pool.take(64, bytes().device(fake));
  EXPECT_EQ(calls(), (Calls{"block 1", "keep 1"}));
  device().stream = 1;
}

TEST(ShardStorage, ALeaseOnAnotherStreamWaitsForTheLastOnes) {
  std::vector<uint8_t> memory(64);
  const c10::Device fake(c10::DeviceType::PrivateUse1, 0);
  ShardStorage storage(fake);
  const PlaneId plane =
      storage.add("x", 64, at::kByte, {}, {32, 64},
                  at::for_blob(memory.data(), {64}).options(bytes().device(fake)).target_device(fake).make_tensor());
  using Calls = std::vector<std::string>;
  const auto calls = [] { return std::exchange(device().calls, {}); };
  const auto lease = [&](int64_t stream, Access access, plan::Range range) {
    device().stream = stream;
    const Lease lease = storage.acquire(plane, range, access, Medium::kDevice);
    EXPECT_EQ(lease.data().data_ptr(), memory.data() + range.begin);
    return calls();
  };
  EXPECT_EQ(lease(1, Access::kUpdate, {0, 32}), Calls{});
  EXPECT_EQ(calls(), (Calls{"record 1", "keep 1"}));
  EXPECT_EQ(lease(1, Access::kRead, {0, 32}), Calls{});
  calls();
  EXPECT_EQ(lease(2, Access::kRead, {32, 64}), Calls{});  // nobody had this block
  calls();
  EXPECT_EQ(lease(3, Access::kRead, {0, 32}), (Calls{"block 3", "keep 3"}));
  calls();
  EXPECT_EQ(lease(4, Access::kWrite, {0, 64}), (Calls{"block 4", "keep 4", "block 4", "keep 4", "block 4", "keep 4"}));
  device().stream = 1;
}

}  // namespace
}  // namespace ds::storage

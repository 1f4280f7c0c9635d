// Memory of gathered parameters: how much of it is kept. streams_test.cpp has who waits for whom.
#include "storage/scratch_pool.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

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

}  // namespace
}  // namespace ds::storage

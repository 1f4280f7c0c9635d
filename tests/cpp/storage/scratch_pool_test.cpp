// Memory of gathered parameters: how much of it is kept. streams_test.cpp has who waits for whom.
#include "storage/scratch_pool.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
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

// Buffers of one pool that are taken and given back by number; `fresh` counts those that nobody had given back.
struct Borrower {
  ScratchPool pool{0, Reuse::kAnySize};
  std::map<int, at::Tensor> lent;
  int fresh = 0;
  int64_t largest = 0;
  size_t most = 0;

  int64_t total() const {
    int64_t bytes = pool.idle_bytes();
    for (const auto& one : lent) bytes += one.second.numel();
    return bytes;
  }
  void take(int number, int64_t size) {
    at::Tensor memory = pool.take(size, c10::Device(at::kCPU));
    fresh += !memory.defined();
    lent[number] = memory.defined() ? memory : at::empty({size}, bytes());
    EXPECT_GE(lent[number].numel(), size);
    largest = std::max(largest, size);
    most = std::max(most, lent.size());
    EXPECT_LE(total(), static_cast<int64_t>(most) * largest);
  }
  void give(int number) {
    pool.give(std::exchange(lent.at(number), at::Tensor()));
    lent.erase(number);
  }
};

TEST(ScratchPool, ABufferOfAnySizeServesSmallerRequests) {
  Borrower one;
  const auto total_after = [&](int64_t size) {
    one.take(0, size);
    one.give(0);
    return one.total();
  };
  EXPECT_EQ(total_after(50), 50);
  EXPECT_EQ(total_after(80), 80);  // takes the place of the first
  EXPECT_EQ(total_after(20), 80);
  EXPECT_EQ(one.fresh, 2);

  one.take(0, 20);
  one.take(1, 30);
  one.give(0);
  one.give(1);
  EXPECT_EQ(one.total(), 80 + 30);
  one.take(0, 25);
  EXPECT_EQ(one.lent[0].numel(), 30);  // the smallest that is large enough
  one.take(1, 90);
  EXPECT_EQ(one.total(), 30 + 90);
}

TEST(ScratchPool, RequestsThatAreRepeatedSoonNeedNoFreshMemory) {
  std::mt19937 random(1);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); };
  for (int run = 0; run < 200; ++run) {
    // Buckets: some are on their way at one time, each with up to three buffers of different kinds.
    std::vector<std::vector<int64_t>> buckets(1 + below(20));
    for (auto& sizes : buckets) {
      const int64_t numel = 1 + below(1000);
      sizes = {4 * numel};
      if (run % 2) sizes.push_back(2 * numel);
      if (run % 3) sizes.push_back(1 + numel / 2);
    }
    const size_t under_way = 1 + static_cast<size_t>(below(3));
    Borrower borrower;
    int fresh = -1, rounds = 0;
    for (; borrower.fresh != fresh; ++rounds) {
      fresh = borrower.fresh;
      for (size_t b = 0; b < buckets.size() + under_way; ++b) {
        if (b >= under_way)
          for (size_t i = 0; i < buckets[b - under_way].size(); ++i)
            borrower.give(static_cast<int>(3 * (b - under_way) + i));
        if (b < buckets.size())
          for (size_t i = 0; i < buckets[b].size(); ++i) borrower.take(static_cast<int>(3 * b + i), buckets[b][i]);
      }
    }
    EXPECT_LE(rounds, 8) << "run " << run;
  }
}

}  // namespace
}  // namespace ds::storage

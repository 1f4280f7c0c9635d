#include "storage/tensor_store.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include "../error_of.h"
#include "planes.h"
#include "storage/meta_memory.h"

namespace ds::storage {
namespace {

at::Tensor numbers(int64_t rows, float first, at::ScalarType type = at::kFloat) {
  return at::arange(first, first + static_cast<float>(rows * 3), at::kFloat).view({rows, 3}).to(type).to(test_device());
}

class TensorStoreIn : public ::testing::TestWithParam<Medium> {
 protected:
  io::Folder folder;
  TensorStore store{test_device(), at_rest(GetParam(), folder.path())};
};

TEST_P(TensorStoreIn, WhatWaitsComesBackWhateverBecameOfTheTensor) {
  std::vector<int64_t> waiting;
  for (int i = 0; i < 9; ++i) {
    at::Tensor tensor = numbers(40, static_cast<float>(100 * i), i % 2 ? at::kDouble : at::kFloat);
    waiting.push_back(store.put(tensor));
    tensor.zero_();
  }
  EXPECT_EQ(store.waiting(), 9);
  for (int i = 8; i >= 0; --i) {
    if (i > 0) store.prefetch(waiting[i - 1]);
    const at::Tensor found = store.get(waiting[i]);
    EXPECT_EQ(found.scalar_type(), i % 2 ? at::kDouble : at::kFloat);
    EXPECT_TRUE(found.to(at::kFloat).cpu().equal(numbers(40, static_cast<float>(100 * i)).cpu()));
    store.drop(waiting[i]);
  }
  EXPECT_EQ(store.waiting(), 0);
  EXPECT_TRUE(says(error_of([&] { store.get(waiting[0]); }), "it has been dropped"));
}

TEST_P(TensorStoreIn, BlocksAreUsedAgain) {
  const auto resting = [&] { return store.usage()[static_cast<size_t>(GetParam())].resting; };
  int64_t after_first = 0;
  for (int step = 0; step < 5; ++step) {
    std::vector<int64_t> waiting;
    for (int i = 0; i < 8; ++i) waiting.push_back(store.put(numbers(64, static_cast<float>(step + i))));
    for (int i = 0; i < 8; ++i) {
      EXPECT_TRUE(store.get(waiting[i]).cpu().equal(numbers(64, static_cast<float>(step + i)).cpu()));
      store.drop(waiting[i]);
    }
    if (step == 0) after_first = resting();
    EXPECT_EQ(resting(), after_first);
  }
}

TEST_P(TensorStoreIn, ShapesOfAllKinds) {
  const at::Tensor turned = numbers(5, 0).t();
  const int64_t number = store.put(turned),
                none = store.put(at::empty({0, 4}, at::device(test_device()).dtype(at::kHalf)));
  EXPECT_TRUE(store.get(number).cpu().equal(turned.cpu()));
  const at::Tensor found = store.get(none);
  EXPECT_EQ(found.sizes(), (c10::IntArrayRef{0, 4}));
  EXPECT_EQ(found.scalar_type(), at::kHalf);
  store.drop(none);
}

// Copies are on their way until they need more bytes of the device than they may have. The oldest ends first.
TEST(TensorStoreOnMeta, CopiesAreOnTheirWayWhileThereIsRoom) {
  MetaMemory memory;
  memory.install();
  memory.set_owner("layers");
  {
    Placement in_files;
    in_files.rest = Medium::kFile;
    in_files.folder = "/this folder/does not exist";
    TensorStore store(c10::Device(at::kMeta), in_files);
    const auto copies = [&] { return memory.owned()["buffers"]; };
    const auto options = at::TensorOptions().device(at::kMeta).dtype(at::kByte);
    std::vector<int64_t> waiting;
    for (int i = 0; i < 3; ++i) waiting.push_back(store.put(at::empty({1 << 20}, options)));
    const int64_t one = copies();
    EXPECT_GE(one, 1 << 20);
    for (const int64_t bytes : {1000, 400'000, 500'000, 300'000})
      waiting.push_back(store.put(at::empty({bytes}, options)));
    EXPECT_GT(copies(), 1'200'000);
    EXPECT_LE(copies(), TensorStore::room(1 << 20));
    for (size_t i = waiting.size(); i-- > 0;) {
      EXPECT_TRUE(store.get(waiting[i]).is_meta());
      store.drop(waiting[i]);
      EXPECT_LE(copies(), TensorStore::room(1 << 20));
    }
    store.put(at::empty({1 << 20}, options));  // the block of one that was dropped
  }
  EXPECT_EQ(memory.live(), 0);
}

INSTANTIATE_TEST_SUITE_P(Media, TensorStoreIn, ::testing::ValuesIn(kMedia));

}  // namespace
}  // namespace ds::storage

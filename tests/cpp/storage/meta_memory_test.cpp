// Bytes of tensors without memory.
#include "storage/meta_memory.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

namespace ds::storage {
namespace {

at::Tensor meta(int64_t elements) {
  return at::empty({elements}, at::TensorOptions().device(at::kMeta).dtype(at::kFloat));
}

TEST(MetaMemory, CountsStoragesUntilTheyAreReleased) {
  MetaMemory memory;
  at::Tensor kept, weight = meta(1000);
  memory.ignore(weight);
  memory.track(weight.view({10, 100}));
  {
    const at::Tensor made = meta(6);
    memory.track(made);
    memory.track(made);
    kept = made.view({2, 3});
    memory.track(kept);
  }
  EXPECT_EQ(memory.live(), 24);
  {
    const at::Tensor other = meta(100);
    memory.track(other);
    memory.track(at::ones({5}));  // has memory of its own
    EXPECT_EQ(memory.live(), 424);
  }
  EXPECT_EQ(memory.live(), 24);
  EXPECT_EQ(memory.peak(), 424);
  memory.reset_peak();
  EXPECT_EQ(memory.peak(), 24);
  kept.reset();
  EXPECT_EQ(memory.live(), 0);
}

TEST(MetaMemory, TensorsMayOutliveIt) {
  at::Tensor made = meta(6);
  { MetaMemory().track(made); }
  made.reset();
}

}  // namespace
}  // namespace ds::storage

// Memory of received messages is used again when nobody has it, and never before.
#include "comm/pipe/receive_buffers.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

namespace ds::comm {
namespace {

constexpr int64_t kNumel = 100'000;

TEST(ReceiveBuffers, AreUsedAgainWhenNobodyHasThem) {
  ReceiveBuffers buffers;
  at::Tensor first = buffers.take({kNumel}, at::kFloat);
  const void* const memory = first.data_ptr();
  const at::Tensor second = buffers.take({kNumel}, at::kFloat);
  EXPECT_NE(second.data_ptr(), memory);
  at::Tensor view = first.narrow(0, 7, 3);
  first.reset();
  EXPECT_NE(buffers.take({kNumel}, at::kFloat).data_ptr(), memory);  // a view has it
  view.reset();
  const at::Tensor again = buffers.take({2, kNumel - 500}, at::kHalf);  // the same bytes, or a few fewer
  EXPECT_EQ(again.data_ptr(), memory);
  EXPECT_EQ(again.sizes(), (at::IntArrayRef{2, kNumel - 500}));
  EXPECT_EQ(again.scalar_type(), at::kHalf);
  EXPECT_TRUE(again.is_contiguous());
  EXPECT_EQ(buffers.held(), 3);
}

TEST(ReceiveBuffers, OtherSizesDoNotPileUp) {
  ReceiveBuffers buffers;
  EXPECT_EQ(buffers.take({0, 3}, at::kLong).numel(), 0);
  EXPECT_EQ(buffers.held(), 0);  // small ones are the allocator's
  for (int64_t turn = 0; turn < 10 * ReceiveBuffers::kIdle; ++turn)
    EXPECT_EQ(buffers.take({kNumel << (2 * (turn % 3))}, at::kFloat).numel(), kNumel << (2 * (turn % 3)));
  EXPECT_EQ(buffers.held(), 3);
  for (int64_t turn = 0; turn < 2 * ReceiveBuffers::kIdle; ++turn) buffers.take({kNumel}, at::kFloat);
  buffers.take({kNumel / 4}, at::kFloat);
  EXPECT_EQ(buffers.held(), 2);
}

}  // namespace
}  // namespace ds::comm

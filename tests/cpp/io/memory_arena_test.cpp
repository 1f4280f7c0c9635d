#include "io/memory_arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

namespace ds::io {
namespace {

TEST(MemoryArena, BlocksAreAlignedAndTheirOwn) {
  const std::vector<uint64_t> sizes = {1, 0, 100, 5 << 20, 64, 3 << 20};
  const auto arena = MemoryArena::make(sizes);
  for (size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(arena->block(i)) % MemoryArena::kAlignment, 0U);
    std::memset(arena->block(i), static_cast<int>(i + 1), sizes[i]);
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    const char* data = arena->block(i);
    EXPECT_TRUE(std::all_of(data, data + sizes[i], [i](char c) { return c == static_cast<char>(i + 1); })) << i;
  }
}

TEST(MemoryArena, AReleasedBlockGivesItsOwnPagesBackAndNoOthers) {
  const std::vector<uint64_t> sizes = {10000, 1 << 20, 10000};
  const auto arena = MemoryArena::make(sizes);
  for (size_t i = 0; i < sizes.size(); ++i) std::memset(arena->block(i), 7, sizes[i]);
  arena->release(1);
  for (const size_t i : {size_t{0}, size_t{2}}) {
    const char* data = arena->block(i);
    EXPECT_TRUE(std::all_of(data, data + sizes[i], [](char c) { return c == 7; }));
  }
  EXPECT_EQ(arena->block(1)[1 << 19], 0);  // a new page
}

TEST(MemoryArena, NothingAtAll) { EXPECT_NE(MemoryArena::make({}), nullptr); }

}  // namespace
}  // namespace ds::io

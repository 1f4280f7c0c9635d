#include "io/memory/host_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "base/error.h"

namespace ds::io {
namespace {

std::vector<uint8_t> pattern(size_t bytes, uint8_t seed) {
  std::vector<uint8_t> made(bytes);
  for (size_t i = 0; i < bytes; ++i) made[i] = static_cast<uint8_t>(seed + i * 31 + (i >> 12));
  return made;
}

TEST(HostMemory, IsThereAlignedAndWritable) {
  for (size_t bytes : {size_t{1}, size_t{4095}, size_t{4096}, size_t{(4 << 20) + 1}, size_t{9 << 20}}) {
    const HostMemory memory(bytes, 3);
    EXPECT_EQ(memory.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 4096, 0u);
    memset(memory.data(), 0x5a, bytes);
    EXPECT_EQ(memory.data()[bytes - 1], 0x5a);
  }
}

TEST(HostMemory, RefusesNothingAndTooMuch) {
  EXPECT_THROW(HostMemory(0, 1), ds::Error);
  EXPECT_THROW(HostMemory(size_t{1} << 60, 1), ds::Error);
  EXPECT_THROW(HostMemory(1, 0), ds::Error);
}

TEST(CopyAll, CopiesEveryByteAndNoOther) {
  for (int threads : {1, 2, 5}) {
    const std::vector<size_t> sizes = {0, 1, 63, 4 << 20, (4 << 20) + 1, 11'000'003};
    const size_t total = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
    std::vector<uint8_t> to(total + sizes.size() + 1, 0xee);
    std::vector<std::vector<uint8_t>> from;
    std::vector<Copy> copies;
    size_t at = 1;
    for (size_t i = 0; i < sizes.size(); ++i) {
      from.push_back(pattern(sizes[i], static_cast<uint8_t>(i)));
      copies.push_back({from.back().data(), to.data() + at, sizes[i]});
      at += sizes[i] + 1;
    }
    copy_all(copies, threads);
    at = 1;
    EXPECT_EQ(to[0], 0xee);
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_TRUE(std::equal(from[i].begin(), from[i].end(), to.begin() + at))
          << "copy " << i << ", threads " << threads;
      EXPECT_EQ(to[at + sizes[i]], 0xee);
      at += sizes[i] + 1;
    }
  }
}

TEST(CopyAll, NothingToDoIsNothing) {
  copy_all({}, 4);
  EXPECT_THROW(copy_all({}, 0), ds::Error);
}

}  // namespace
}  // namespace ds::io

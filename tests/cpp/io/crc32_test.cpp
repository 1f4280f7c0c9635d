#include "io/crc32.h"

#include <gtest/gtest.h>

#include "folder.h"
#include "io/crc32_fold.h"

namespace ds::io {
namespace {

TEST(Crc32, KnownValue) { EXPECT_EQ(crc32_of("123456789", 9), 0xcbf43926u); }

TEST(Crc32, NothingIsZeroAndChangesNothing) {
  EXPECT_EQ(crc32_of(nullptr, 0), 0u);
  EXPECT_EQ(crc32_of(nullptr, 0, 77), 77u);
  EXPECT_EQ(crc32_joined(5, 0, 0), 5u);
}

TEST(Crc32, AgreesWithThePlainLoopWherverItIsCut) {
  for (size_t bytes : {1, 2, 63, 4096, 70001, 300000}) {
    const std::string text = random_bytes(bytes);
    const uint32_t expected = plain_crc32(text);
    EXPECT_EQ(crc32_of(text.data(), bytes), expected);
    for (size_t cut : {size_t{0}, size_t{1}, bytes / 3, bytes}) {
      const uint32_t first = crc32_of(text.data(), cut);
      const uint32_t second = crc32_of(text.data() + cut, bytes - cut);
      EXPECT_EQ(crc32_joined(first, second, bytes - cut), expected) << bytes << " cut at " << cut;
      EXPECT_EQ(crc32_of(text.data() + cut, bytes - cut, first), expected);
    }
  }
}

TEST(Crc32, FoldedIsThatOfThePlainLoopForEveryLengthAndAddress) {
  if (!can_fold_crc32()) GTEST_SKIP() << "this processor has no carry-less multiplication";
  const std::string text = random_bytes(kFoldFrom + 400);
  for (size_t begin = 0; begin < 17; ++begin) {
    for (size_t bytes = kFoldFrom; begin + bytes <= text.size(); bytes += begin == 0 ? 1 : 37) {
      const std::string part = text.substr(begin, bytes);
      EXPECT_EQ(fold_crc32(text.data() + begin, bytes, 0), plain_crc32(part)) << begin << " " << bytes;
      const uint32_t before = plain_crc32(text.substr(0, begin));
      EXPECT_EQ(fold_crc32(text.data() + begin, bytes, before), plain_crc32(text.substr(0, begin + bytes)));
    }
  }
}

TEST(Crc32, JoinsStretchesOfMoreThan4GiB) {
  // Zeros: joining 2^20 of them 2^13 times, by doubling, equals one stretch of 2^33.
  const std::string zeros(1 << 20, 0);
  uint32_t sum = crc32_of(zeros.data(), zeros.size());
  uint64_t bytes = zeros.size();
  uint32_t unit = sum;
  for (int i = 0; i < 13; ++i, bytes *= 2) sum = crc32_joined(sum, sum, bytes);
  uint32_t slow = unit;
  for (uint64_t i = 1; i < 8192; ++i) slow = crc32_joined(slow, unit, 1 << 20);
  EXPECT_EQ(sum, slow);
}

TEST(Crc32, StreamsWhatItSumsAndNothingBeside) {
  for (size_t begin = 0; begin < 70; begin += 3) {
    for (size_t bytes : {0, 1, 63, 64, 127, 128, 191, 192, 193, 255, 1000, 70003}) {
      const std::string text = random_bytes(bytes + 1);
      std::string to(begin + bytes + 64, 'x');
      EXPECT_EQ(stream_with_crc32(to.data() + begin, text.data() + 1, bytes), plain_crc32(text.substr(1))) << bytes;
      EXPECT_EQ(to, std::string(begin, 'x') + text.substr(1) + std::string(64, 'x')) << begin << " " << bytes;
    }
  }
}

TEST(Crc32, CopiesWhatItSums) {
  for (size_t bytes : {0, 1, 65535, 65536, 65537, 1000003}) {
    const std::string text = random_bytes(bytes);
    std::string to(bytes, 1);
    EXPECT_EQ(copy_with_crc32(to.data(), text.data(), bytes), plain_crc32(text));
    EXPECT_EQ(to, text);
  }
}

}  // namespace
}  // namespace ds::io

#include "io/range_reader.h"

#include <errno.h>
#include <gtest/gtest.h>

#include "../error_of.h"
#include "folder.h"
#include "io/file_error.h"

namespace ds::io {
namespace {

class RangeReader : public testing::Test {
 protected:
  RangeReader() : text_(random_bytes(20000001)) { std::ofstream(path_, std::ios::binary) << text_; }
  const Folder folder_;
  const std::string path_ = folder_ / "x";
  const std::string text_;
};

TEST_F(RangeReader, SumsAgreeWithThePlainLoop) {
  const std::vector<Range> ranges = {
      {0, kToTheEnd}, {1, 17000000}, {9, 0}, {20000000, kToTheEnd}, {20000001, kToTheEnd}};
  const std::vector<uint32_t> expected = {plain_crc32(text_), plain_crc32(text_.substr(1, 17000000)), 0,
                                          plain_crc32(text_.substr(20000000)), 0};
  for (int threads : {1, 3, 1000}) EXPECT_EQ(sum_ranges(path_, ranges, threads), expected);
}

TEST_F(RangeReader, RangesBehindTheEndAreErrors) {
  for (const Range& bad : {Range{20000001, 1}, Range{50000000, 0}, Range{1, ~uint64_t{0} - 5}})
    EXPECT_THROW(sum_ranges(path_, {bad}, 2), Error);
  EXPECT_THROW(sum_ranges(path_, {{20000002, kToTheEnd}}, 1), Error);
}

TEST_F(RangeReader, NoFileOrAFolder) {
  EXPECT_EQ(thrown<FileError>([&] { sum_ranges(folder_ / "none", {}, 1); }).code(), ENOENT);
  EXPECT_THROW(sum_ranges(folder_.path(), {}, 1), FileError);
  const size_t before = open_descriptors();
  EXPECT_THROW(sum_ranges(folder_.path(), {}, 1), FileError);
  EXPECT_EQ(open_descriptors(), before);
}

}  // namespace
}  // namespace ds::io

#include "formats/indexed_dataset.h"

#include <gtest/gtest.h>

#include "../error_of.h"
#include "formats/format_error.h"
#include "samples.h"
#include "temporary.h"

namespace ds::formats {
namespace {

IndexedHeader header_of(const std::string& index, uint64_t data_bytes) {
  const Temporary file("index");
  write_file(file.path(), index);
  return read_indexed_header(CheckedFile(file.path()), data_bytes);
}

std::string refusal(const std::string& index, uint64_t data_bytes) {
  return failure_of<DamagedIndex>([&] { header_of(index, data_bytes); });
}

TEST(IndexedDataset, PartsOfAnIndex) {
  const IndexedHeader found = header_of(mapped_index(4, {3, 0, 5}, 4, {0, 2, 3}), 32);
  EXPECT_STREQ(found.element, "int32");
  EXPECT_EQ(found.documents, 3u);
  EXPECT_EQ(found.doc_entries, 3u);
  EXPECT_EQ(found.sizes_at, 34u);
  EXPECT_EQ(found.pointers_at, 34u + 3 * 4);
  EXPECT_EQ(found.doc_idx_at, 34u + 3 * 12);
  EXPECT_EQ(header_of(mapped_index(5, {}, 8), 0).documents, 0u);
  EXPECT_STREQ(header_of(mapped_index(3, {1, 2}, 2) + "\1\2", 6).element, "int16") << "one byte for each document";
}

TEST(IndexedDataset, AnOlderIndex) {
  const IndexedHeader found = header_of(older_index(4, 4, {4, 1, 2}), 28);
  EXPECT_STREQ(found.element, "int32");
  EXPECT_EQ(found.documents, 3u);
  EXPECT_EQ(found.size_bytes, 8);
  EXPECT_EQ(found.pointer_unit, 4);
  EXPECT_STREQ(header_of(older_index(8, 2, {4, 1}), 10).element, "uint16");
}

TEST(IndexedDataset, TheBytesOfAnElementSayWhatACodeMeans) {
  const auto element = [](int code, int64_t bytes, uint64_t data) {
    return std::string(header_of(mapped_index(code, {3, 1, 2}, bytes), data).element);
  };
  EXPECT_EQ(element(6, 2, 12), "uint16");
  EXPECT_EQ(element(6, 8, 48), "float64");
  EXPECT_EQ(element(7, 4, 24), "uint32");
  EXPECT_EQ(element(7, 8, 48), "float64");
  EXPECT_EQ(element(8, 8, 48), "uint64");
  EXPECT_EQ(element(8, 2, 12), "uint16");
  EXPECT_TRUE(says(refusal(mapped_index(8, {3, 1, 2}, 4), 24), "no type of the code 8"));
  EXPECT_TRUE(says(refusal(mapped_index(6, {3}, 2), 13), "no type of the code 6")) << "one document";
}

TEST(IndexedDataset, DamagedFilesAreRefusedWithTheOffset) {
  const std::string good = mapped_index(4, {3, 0, 5}, 4, {0, 2, 3});
  const auto changed = [&](size_t at, const std::string& bytes) {
    std::string other = good;
    return other.replace(at, bytes.size(), bytes);
  };
  EXPECT_TRUE(says(refusal("GIF89a..........", 32), "offset 0: it begins neither with MMIDIDX"));
  EXPECT_TRUE(says(refusal("MMID", 32), "within its first bytes: it was cut"));
  EXPECT_TRUE(says(refusal(changed(9, little<uint64_t>(2)), 32), "offset 9: version 2 is unknown"));
  EXPECT_TRUE(says(refusal(changed(17, "\x09"), 32), "offset 17: the code 9"));
  EXPECT_TRUE(says(refusal(changed(18, little(~uint64_t{0})), 32), "offset 18: it says that there are"));
  EXPECT_TRUE(says(refusal(good.substr(0, 60), 32),
                   "offset 46: 3 pointers of 8 bytes are expected, and the file ends "
                   "after 60 bytes"));
  EXPECT_TRUE(says(refusal(good + "ab", 32), "2 bytes follow after the last part"));
  EXPECT_TRUE(says(refusal(changed(38, little<int32_t>(-1)), 32), "offset 38: document 1 has -1 elements"));
  EXPECT_TRUE(says(refusal(good, 31), "document 2 of 5 elements at 12 is not within the 31 bytes"));
  EXPECT_TRUE(says(refusal(changed(46, little<int64_t>(-8)), 32), "offset 46: document 0"));
  EXPECT_TRUE(says(refusal(changed(46, little(~uint64_t{0} >> 1)), 32), "offset 46: document 0"));
  EXPECT_TRUE(says(refusal(changed(78, little<int64_t>(4)), 32), "entry 1 of doc_idx is 4"));
  EXPECT_TRUE(says(refusal(older_index(4, 3, {1}), 32), "an element has 3 bytes"));
  EXPECT_TRUE(says(refusal(older_index(4, 8, {1}), 32), "no type of the code 4"));
}

}  // namespace
}  // namespace ds::formats

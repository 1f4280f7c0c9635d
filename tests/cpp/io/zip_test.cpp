#include <gtest/gtest.h>
#include <string.h>

#include <map>

#include "folder.h"
#include "io/crc32.h"
#include "io/file_error.h"
#include "io/zip/zip_writer.h"

namespace ds::io {
namespace {

uint64_t number(const std::string& text, size_t at, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i)
    value |= static_cast<uint64_t>(static_cast<unsigned char>(text.at(at + i))) << (8 * i);
  return value;
}

struct Found {
  std::string name;
  uint64_t bytes, header;
  uint32_t crc32;
};

// Reads a directory as APPNOTE 4.3 tells, from the end of a file whose last bytes are `tail`, which starts at `from`.
std::vector<Found> read_directory(const std::string& tail, uint64_t from) {
  const size_t end = tail.size() - 22;
  EXPECT_EQ(tail.substr(end, 4), "PK\x05\x06");
  const size_t locator = end - 20;
  EXPECT_EQ(tail.substr(locator, 4), std::string("PK\x06\x07"));
  const size_t end64 = static_cast<size_t>(number(tail, locator + 8, 8) - from);
  EXPECT_EQ(tail.substr(end64, 4), "PK\x06\x06");
  EXPECT_EQ(end64 + 56, locator);
  const uint64_t count = number(tail, end64 + 32, 8);
  EXPECT_EQ(number(tail, end + 10, 2), std::min<uint64_t>(count, 0xffff));
  size_t at = static_cast<size_t>(number(tail, end64 + 48, 8) - from);
  EXPECT_EQ(at + number(tail, end64 + 40, 8), end64);
  std::vector<Found> found;
  for (uint64_t i = 0; i < count; ++i) {
    EXPECT_EQ(tail.substr(at, 4), "PK\x01\x02");
    const size_t name = number(tail, at + 28, 2), extra = number(tail, at + 30, 2);
    Found one{tail.substr(at + 46, name), number(tail, at + 24, 4), number(tail, at + 42, 4),
              static_cast<uint32_t>(number(tail, at + 16, 4))};
    size_t wide = at + 46 + name + 4;
    if (extra) {
      EXPECT_EQ(number(tail, at + 46 + name, 2), 1u);
    }
    if (one.bytes == 0xffffffff) one.bytes = number(tail, wide, 8), wide += 16;
    if (one.header == 0xffffffff) one.header = number(tail, wide, 8);
    found.push_back(one);
    at += 46 + name + extra;
  }
  EXPECT_EQ(at, end64);
  return found;
}

TEST(ZipWriter, WhatItWritesCanBeRead) {
  const Folder folder;
  Files files;
  std::vector<ZipEntry> entries;
  std::vector<std::string> texts;
  for (size_t bytes : {0, 1, 63, 64, 65, 0, 5000, 3000001, 0}) {
    entries.push_back({"archive/data/" + std::to_string(entries.size()), bytes});
    texts.push_back(random_bytes(bytes, static_cast<unsigned>(bytes + 1)));
  }
  StreamOptions options;
  options.buffer_bytes = 1 << 18;
  ZipWriter writer(files, folder / "x.zip", entries, options);
  for (const std::string& text : texts) {
    writer.write(text.data(), text.size() / 2);
    writer.write(text.data() + text.size() / 2, text.size() - text.size() / 2);
  }
  const Sum total = writer.finish();
  const std::string file = content(folder / "x.zip");
  EXPECT_EQ(total.bytes, file.size());
  EXPECT_EQ(file.size(), writer.layout().file_bytes());
  EXPECT_EQ(total.crc32, plain_crc32(file));
  const std::vector<Found> found = read_directory(file, 0);
  ASSERT_EQ(found.size(), entries.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].name, entries[i].name);
    EXPECT_EQ(found[i].bytes, entries[i].bytes);
    EXPECT_EQ(found[i].crc32, plain_crc32(texts[i]));
    EXPECT_EQ(writer.crc32()[i], found[i].crc32);
    const size_t header = found[i].header;
    EXPECT_EQ(file.substr(header, 4), "PK\x03\x04");
    const size_t data = header + 30 + number(file, header + 26, 2) + number(file, header + 28, 2);
    EXPECT_EQ(data % 64, 0u);
    EXPECT_EQ(data, writer.layout().data_offset(i));
    EXPECT_EQ(file.substr(data, texts[i].size()), texts[i]);
    if (texts[i].empty()) continue;
    const size_t descriptor = data + texts[i].size();
    EXPECT_EQ(file.substr(descriptor, 4), "PK\x07\x08");
    EXPECT_EQ(number(file, descriptor + 4, 4), found[i].crc32);
    EXPECT_EQ(number(file, descriptor + 8, 4), texts[i].size());
  }
}

TEST(ZipLayout, FourGibibytesTakeWideFields) {
  const uint64_t giants[] = {0xfffffffe, 0xffffffff, 0x100000000, 0x900000001};
  std::vector<ZipEntry> entries;
  for (uint64_t bytes : giants) entries.push_back({std::to_string(bytes), bytes});
  entries.push_back({"small and far", 3});
  const ZipLayout layout(entries);
  const std::string tail = layout.directory({1, 2, 3, 4, 5});
  const std::vector<Found> found = read_directory(tail, layout.file_bytes() - tail.size());
  ASSERT_EQ(found.size(), entries.size());
  uint64_t at = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    EXPECT_EQ(found[i].name, entries[i].name);
    EXPECT_EQ(found[i].bytes, entries[i].bytes);
    EXPECT_EQ(found[i].header, at);
    EXPECT_EQ(found[i].crc32, i + 1);
    const std::string header = layout.local_header(i);
    EXPECT_EQ(at + header.size(), layout.data_offset(i));
    EXPECT_EQ(layout.data_offset(i) % 64, 0u);
    const bool wide = entries[i].bytes >= 0xffffffff;
    const std::string descriptor = layout.descriptor(i, 9);
    ASSERT_EQ(descriptor.size(), wide ? 24u : 16u);
    EXPECT_EQ(number(descriptor, 8, wide ? 8 : 4), entries[i].bytes);
    at += header.size() + entries[i].bytes + descriptor.size();
  }
}

TEST(ZipLayout, ManyEntries) {
  std::vector<ZipEntry> entries;
  entries.reserve(70000);
  for (int i = 0; i < 70000; ++i) entries.push_back({"e" + std::to_string(i), 1});
  const ZipLayout layout(entries);
  const std::string tail = layout.directory(std::vector<uint32_t>(entries.size()));
  EXPECT_EQ(read_directory(tail, layout.file_bytes() - tail.size()).size(), 70000u);
}

TEST(ZipLayout, RefusesBadNames) {
  EXPECT_THROW(ZipLayout({{"", 1}}), Error);
  EXPECT_THROW(ZipLayout({{std::string(70000, 'x'), 1}}), Error);
  EXPECT_THROW(ZipLayout({{"a", 1}, {"a", 2}}), Error);
}

TEST(ZipWriter, EntriesTakeWhatTheyAnnounced) {
  const Folder folder;
  Files files;
  {
    ZipWriter writer(files, folder / "x", {{"a", 3}, {"empty", 0}, {"b", 2}}, {});
    EXPECT_THROW(writer.write("12345", 5), Error);
    writer.write("123", 3);
    EXPECT_EQ(writer.complete(), 2u);
    EXPECT_THROW(writer.finish(), Error);
    writer.write("45", 2);
    EXPECT_THROW(writer.write("6", 1), Error);
    writer.finish();
  }
  EXPECT_EQ(folder.entries(), 1u);
  { ZipWriter writer(files, folder / "y", {{"a", 3}}, {}); }
  EXPECT_EQ(folder.entries(), 1u);
}

TEST(ZipWriter, NoEntries) {
  const Folder folder;
  Files files;
  ZipWriter writer(files, folder / "x", {}, {});
  writer.finish();
  EXPECT_EQ(read_directory(content(folder / "x"), 0).size(), 0u);
}

}  // namespace
}  // namespace ds::io

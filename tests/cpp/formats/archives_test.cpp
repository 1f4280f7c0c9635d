// Zip files, torch archives of both formats and safetensors headers: offsets of bytes.
#include <gtest/gtest.h>
#include <zlib.h>

#include "formats/format_error.h"
#include "formats/safetensors_header.h"
#include "formats/torch_archive.h"
#include "formats/zip_directory.h"
#include "io/crc32.h"
#include "io/file_error.h"
#include "samples.h"
#include "temporary.h"

namespace ds::formats {

uint32_t crc32_of_text(const std::string& text) { return io::crc32_of(text.data(), text.size()); }

namespace {

TEST(ZipDirectory, FindsStoredRecords) {
  const Temporary file("zip");
  write_file(file.path(), zipped({{"a", "hello"}, {"b/c", "world!"}}));
  const CheckedFile opened(file.path());
  const ZipDirectory directory(opened);
  EXPECT_EQ(directory.names(), (std::vector<std::string>{"a", "b/c"}));
  const ZipRecord record = directory.record("b/c");
  EXPECT_EQ(opened.text(record.offset, record.bytes), "world!");
  EXPECT_THROW(directory.record("c"), DamagedZip);
}

TEST(ZipDirectory, RefusesRecordsThatOverlapOrLeave) {
  const Temporary file("zip");
  std::string overlap = zipped({{"a", "hello"}, {"b", "world!"}});
  overlap.replace(overlap.size() - 22 - 1 - 4, 4, little<uint32_t>(0));  // the second begins where the first does
  for (const std::string& bytes :
       {overlap, zipped({{"../x", "y"}}), zipped({{"a", "1"}, {"a", "2"}}), std::string("PK")}) {
    write_file(file.path(), bytes);
    const CheckedFile opened(file.path());
    EXPECT_THROW(ZipDirectory{opened}, DamagedZip);
  }
}

std::string deflated(const std::string& data) {
  std::string packed(compressBound(data.size()) + 32, '\0');
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));
  stream.avail_in = static_cast<uInt>(data.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  deflate(&stream, Z_FINISH);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

TEST(ZipDirectory, UnpacksAnyPartAndChecksTheSum) {
  std::string data;
  for (int i = 0; i < 300000; ++i) data += static_cast<char>(int64_t{i} * i % 251);
  const std::string packed = deflated(data);
  std::string bytes = zipped({{"a", packed}});
  const size_t central = bytes.size() - 22 - 47;
  for (const size_t header : {size_t{0}, central}) {
    const size_t shift = header == 0 ? 4 : 6;
    bytes.replace(header + shift + 4, 2, little<uint16_t>(8));
    bytes.replace(header + shift + 10, 4, little<uint32_t>(crc32_of_text(data)));
    bytes.replace(header + shift + 18, 4, little<uint32_t>(data.size()));
  }
  const Temporary file("zip");
  write_file(file.path(), bytes);
  {
    const CheckedFile opened(file.path());
    const ZipDirectory directory(opened);
    std::string whole(data.size(), '\0'), part(1000, '\0');
    directory.unpack("a", 0, data.size(), whole.data());
    EXPECT_TRUE(whole == data);
    directory.unpack("a", 262000, 1000, part.data());
    EXPECT_TRUE(part == data.substr(262000, 1000));
  }
  bytes[central + 16] ^= 1;  // the checksum
  write_file(file.path(), bytes);
  const CheckedFile opened(file.path());
  std::string whole(data.size(), '\0');
  EXPECT_THROW(ZipDirectory(opened).unpack("a", 0, data.size(), whole.data()), DamagedZip);
}

TEST(TorchArchive, BothFormatsSayTheSame) {
  for (const bool legacy : {false, true}) {
    const Temporary file("torch");
    write_file(file.path(), legacy ? torch_stream(pickled(state_dict(true))) : torch_zip(pickled(state_dict())));
    TorchArchive archive(file.path());
    NameResolver names;
    const PickleGraph graph = archive.read_structure(names);
    ASSERT_EQ(graph.storages.size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      const StorageRecord record = archive.record_of(graph.storages[i]);
      EXPECT_EQ(archive.file().text(record.offset, record.bytes), i == 0 ? std::string(24, 'a') : std::string(8, 'b'));
    }
    EXPECT_FALSE(archive.swapped());
    EXPECT_EQ(archive.legacy(), legacy);
  }
}

TEST(TorchArchive, RefusesStoragesThatAreNotThere) {
  const Temporary file("torch");
  write_file(file.path(), torch_zip(pickled(tensor(storage("0", "FloatStorage", 7), 0, {7}, {1}))));
  NameResolver names;
  EXPECT_THROW(TorchArchive(file.path()).read_structure(names), DamagedPickle);
  write_file(file.path(), torch_zip(pickled(tensor(storage("7", "FloatStorage", 1), 0, {1}, {1}))));
  EXPECT_THROW(TorchArchive(file.path()).read_structure(names), DamagedZip);
  for (const int64_t numel : {(int64_t{1} << 62) + 1, int64_t{1} << 62, (int64_t{1} << 61) + 1}) {  // 2^64 bytes
    write_file(file.path(), torch_zip(pickled(tensor(storage("0", "DoubleStorage", numel), 0, {1}, {1}))));
    EXPECT_THROW(TorchArchive(file.path()).read_structure(names), DamagedPickle) << numel;
  }
  const std::string stream = torch_stream(pickled(state_dict(true)));
  write_file(file.path(), stream.substr(0, stream.size() - 1));
  EXPECT_THROW(TorchArchive(file.path()).read_structure(names), DamagedPickle);
}

TEST(Safetensors, TellsWhereTensorsLie) {
  const Temporary file("safetensors");
  const std::string header = R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                             R"("a":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}})";
  write_file(file.path(), safetensors(header, 10));
  const auto all = [](const Element&) { return true; };
  const SafetensorsHeader found = read_safetensors_header(CheckedFile(file.path()), all, "2");
  ASSERT_EQ(found.tensors.size(), 2u);
  EXPECT_EQ(found.tensors[0].name, "b");
  EXPECT_EQ(found.tensors[1].offset, 8 + header.size() + 8);
  EXPECT_EQ(found.metadata[0].second, "pt");
  const auto none = [](const Element&) { return false; };
  EXPECT_THROW(read_safetensors_header(CheckedFile(file.path()), none, "2"), DamagedSafetensors);
}

TEST(ReadRanges, FillsAllOnSeveralThreadsAndKnowsTheFile) {
  const Temporary file("ranges");
  std::string bytes(20 << 20, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 2654435761u >> 13);
  write_file(file.path(), bytes);
  const FileIdentity identity = CheckedFile(file.path()).identity();
  std::string first(17 << 20, '\0'), second(1000, '\0');
  read_ranges(file.path(), identity, {{12345, first.size(), first.data()}, {5, 1000, second.data()}, {0, 0, nullptr}},
              3);
  EXPECT_TRUE(first == bytes.substr(12345, first.size()));
  EXPECT_TRUE(second == bytes.substr(5, 1000));
  write_file(file.path(), bytes + "x");
  EXPECT_THROW(read_ranges(file.path(), identity, {{0, 1000, second.data()}}, 1), io::FileError);
}

}  // namespace
}  // namespace ds::formats

// Ranges of files of any size, at any offset, to and from any address: against plain arrays, on disks and where there
// is no O_DIRECT, by every way of asking the kernel, with faults on order.
#include "io/async/transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <string.h>

#include <random>

#include "../error_of.h"
#include "folder.h"
#include "io/memory/aligned_pool.h"
#include "io/file_error.h"
#include "uring.h"

namespace ds::io {
namespace {

using Mode = BlockFile::Mode;

struct System {
  const char* name;
  const char* folder;
  const char* fault;
};
const System kSystems[] = {{"Disk", "/tmp", ""}, {"Tmpfs", "/dev/shm", ""}, {"NoDirect", "/tmp", "direct:1+:einval"}};
const char* const kBackends[] = {"io_uring", "libaio", "threads"};

Backend usable(const char* name) {
  return name == std::string("io_uring") && !has_uring() ? Backend::kAuto : backend_named(name);
}

// Memory that only copies reach.
class FarBytes : public RemoteMemory {
 public:
  explicit FarBytes(std::string bytes) : bytes_(std::move(bytes)) {}
  void load(char* host, uint64_t at, size_t bytes) override { memcpy(host, bytes_.data() + at, bytes); }
  void store(const char* host, uint64_t at, size_t bytes) override { memcpy(bytes_.data() + at, host, bytes); }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class Transfers : public testing::TestWithParam<std::tuple<System, const char*>> {
 protected:
  Transfers() : files_(std::get<0>(GetParam()).fault), folder_(std::get<0>(GetParam()).folder) {
    options_.backend = usable(std::get<1>(GetParam()));
    options_.block_bytes = 16384;
    options_.queue_depth = 3;
  }
  std::string with(const std::string& order) const {
    const std::string always = std::get<0>(GetParam()).fault;
    return always.empty() ? order : always + "," + order;
  }

  Files files_;
  const Folder folder_;
  const std::string path_ = folder_ / "x";
  TransferOptions options_;
};

TEST_P(Transfers, AnySizeOffsetAndAddress) {
  std::mt19937 random(7);
  std::string wanted;  // of the file
  for (int round = 0; round < 60; ++round) {
    const size_t bytes = round % 6 == 0 ? random() % 5000 : random() % 200000;
    const uint64_t offset = round % 3 == 0 ? 0 : round % 3 == 1 ? random() % 20 * kBlockBytes : random() % 100000;
    const size_t shift = round % 4 == 0 ? 0 : random() % 4097;
    options_.single_submit = random() % 2;
    options_.overlap_events = random() % 2;
    options_.queue_depth = static_cast<int>(1 + random() % 9);
    options_.block_bytes = size_t{512} << (random() % 9);
    const std::string text = random_bytes(bytes, random());
    AlignedPool memory(2, bytes + shift + 1);
    char* from = memory.take() + shift;
    memcpy(from, text.data(), bytes);
    if (wanted.size() < offset + bytes) wanted.resize(offset + bytes);
    wanted.replace(offset, bytes, text);
    BlockFile file(files_, path_, Mode::kWrite);
    file.reserve(offset + bytes, offset, bytes);
    write_span(file, {from, nullptr, 0, bytes}, offset, options_);
    compare_span(file, {from, nullptr, 0, bytes}, offset);
    ASSERT_EQ(content(path_) == wanted, true) << round << ": " << bytes << " bytes at " << offset;
    char* to = memory.take() + shift;
    BlockFile again(files_, path_, Mode::kRead);
    read_span(again, {to, nullptr, 0, bytes}, offset, options_);
    ASSERT_EQ(memcmp(to, text.data(), bytes), 0) << round;
  }
}

TEST_P(Transfers, ThroughTheHostFromAndToOtherMemory) {
  const std::string text = random_bytes(150001);
  FarBytes from("head" + text);
  FarBytes to(std::string(text.size() + 9, '-'));
  BlockFile file(files_, path_, Mode::kWrite);
  write_span(file, {nullptr, &from, 4, text.size()}, 5000, options_);
  EXPECT_EQ(content(path_).substr(5000), text);
  read_span(file, {nullptr, &to, 8, text.size()}, 5000, options_);
  EXPECT_EQ(to.bytes().substr(8, text.size()), text);
  EXPECT_EQ(to.bytes().back(), '-');
}

TEST_P(Transfers, ShortTransfersAndInterruptionsGoOn) {
  const std::string text = random_bytes(100000);
  AlignedPool memory(1, text.size());
  char* data = memory.take();
  for (const char* order : {"write:1:short", "write:2:eintr,write:4:short", "write:7:short,write:1:short"}) {
    files_.inject(with(order));
    memcpy(data, text.data(), text.size());
    BlockFile file(files_, path_, Mode::kWrite);
    write_span(file, {data, nullptr, 0, text.size()}, 0, options_);
    EXPECT_EQ(content(path_) == text, true) << order;
  }
  for (const char* order : {"read:1:short", "read:2:eintr", "read:3:short,read:4:short,read:7:short"}) {
    files_.inject(with(order));
    memset(data, 0, text.size());
    BlockFile file(files_, path_, Mode::kRead);
    read_span(file, {data, nullptr, 0, text.size()}, 0, options_);
    EXPECT_EQ(memcmp(data, text.data(), text.size()), 0) << order;
  }
}

TEST_P(Transfers, ErrorsNamePathOffsetAndBytes) {
  const std::string text = random_bytes(100000);
  AlignedPool memory(1, text.size());
  char* data = memory.take();
  memcpy(data, text.data(), text.size());
  const size_t before = open_descriptors();
  for (const auto& [order, code] : {std::make_pair("write:3:enospc", ENOSPC), std::make_pair("write:1:eio", EIO)}) {
    files_.inject(with(order));
    const FileError error = thrown<FileError>([&] {
      BlockFile file(files_, path_, Mode::kWrite);
      write_span(file, {data, nullptr, 0, text.size()}, 0, options_);
    });
    EXPECT_EQ(error.code(), code);
    EXPECT_EQ(error.path(), path_);
    EXPECT_GT(error.bytes(), 0u);
    EXPECT_LE(error.offset() + error.bytes(), text.size() + kBlockBytes);
    EXPECT_TRUE(says(error.what(), path_));
  }
  files_.inject(with("open:99:eio"));
  BlockFile(files_, path_, Mode::kWrite).reserve(text.size(), 0, text.size());
  files_.inject(with("read:2:eio"));
  EXPECT_THROW(
      {
        BlockFile file(files_, path_, Mode::kRead);
        read_span(file, {data, nullptr, 0, text.size()}, 0, options_);
      },
      FileError);
  EXPECT_LE(open_descriptors(), before + 1);  // a ring is kept
}

TEST_P(Transfers, AFileThatEndsTooEarlySaysWhere) {
  std::ofstream(path_) << random_bytes(50000);
  AlignedPool memory(1, 100000);
  char* data = memory.take();
  for (const uint64_t bytes : {uint64_t{50001}, uint64_t{53248}, uint64_t{98304}, uint64_t{99999}}) {
    BlockFile file(files_, path_, Mode::kRead);
    const FileError error = thrown<FileError>([&] { read_span(file, {data, nullptr, 0, bytes}, 0, options_); });
    EXPECT_EQ(error.code(), ENODATA);
    EXPECT_TRUE(says(error.what(), "ends at byte 50000"));
  }
}

TEST_P(Transfers, AnOpenFileKeepsItsDescriptor) {
  const std::string text = random_bytes(70001);
  AlignedPool memory(1, text.size());
  char* data = memory.take();
  memcpy(data, text.data(), text.size());
  for (const int flags : {0, O_DIRECT}) {
    const Descriptor mine(::open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | flags, 0600));
    if (!mine.is_open()) continue;
    {
      BlockFile file(files_, mine.get(), Mode::kWrite);
      EXPECT_EQ(file.path(), path_);
      write_span(file, {data, nullptr, 0, text.size()}, 123, options_);
    }
    EXPECT_EQ(content(path_).substr(123), text);
    EXPECT_GE(::fcntl(mine.get(), F_GETFD), 0);
  }
  EXPECT_THROW(BlockFile(files_, 9999, Mode::kRead), FileError);
}

INSTANTIATE_TEST_SUITE_P(Transfer, Transfers,
                         testing::Combine(testing::ValuesIn(kSystems), testing::ValuesIn(kBackends)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + std::get<1>(info.param);
                         });

TEST(Transfer, ComparingNamesTheByteThatDiffers) {
  const Folder folder;
  Files files;
  std::string text = random_bytes(3 << 20);
  std::ofstream(folder / "x", std::ios::binary) << text;
  BlockFile file(files, folder / "x", Mode::kRead);
  compare_span(file, {text.data(), nullptr, 0, text.size()}, 0);
  text[2500000] ^= 1;
  EXPECT_TRUE(says(error_of([&] {
                     compare_span(file, {text.data() + 100, nullptr, 0, text.size() - 100}, 100);
                   }),
                   "byte 2500000 of the file is not byte 2499900"));
}

TEST(Transfer, PartsMeetAtBlocks) {
  for (const uint64_t offset : {0u, 1u, 4096u, 70000u}) {
    for (const uint64_t bytes : {1u, 4096u, 4097u, 100000u, 1u << 20}) {
      for (const int parts : {1, 2, 3, 16}) {
        const auto made = parts_of(offset, bytes, parts);
        EXPECT_LE(made.size(), static_cast<size_t>(parts));
        uint64_t at = offset;
        for (size_t i = 0; i < made.size(); ++i) {
          EXPECT_EQ(made[i].first, at);
          EXPECT_GT(made[i].second, 0u);
          at += made[i].second;
          if (i + 1 < made.size()) {
            EXPECT_EQ(at % kBlockBytes, 0u);
          }
        }
        EXPECT_EQ(at, offset + bytes);
      }
    }
  }
  EXPECT_TRUE(parts_of(5, 0, 4).empty());
}

TEST(Transfer, OptionsOutOfRangeAreNamed) {
  const auto message = [](auto change) {
    TransferOptions options;
    change(options);
    return error_of([&] { check(options); });
  };
  EXPECT_EQ(message([](TransferOptions& o) {}), "no error");
  EXPECT_TRUE(says(message([](TransferOptions& o) { o.block_bytes = 0; }), "block_size"));
  EXPECT_TRUE(says(message([](TransferOptions& o) { o.queue_depth = 0; }), "queue_depth"));
  EXPECT_TRUE(says(message([](TransferOptions& o) { o.queue_depth = 5000; }), "4096"));
}

TEST(BlockFile, AFullDiskIsAnErrorBeforeTheFirstByte) {
  const Folder folder;
  Files files;
  BlockFile file(files, folder / "x", Mode::kWrite);
  const uint64_t bytes = uint64_t{1} << 43;
  const FileError error = thrown<FileError>([&] { file.reserve(bytes, 0, bytes); });
  EXPECT_TRUE(error.code() == ENOSPC || error.code() == EFBIG) << error.what();
  EXPECT_EQ(error.bytes(), bytes);
}

TEST(BlockFile, FoldersAndMissingFilesAreNamed) {
  const Folder folder;
  Files files;
  EXPECT_THROW(BlockFile(files, folder.path(), Mode::kRead), FileError);
  EXPECT_THROW(BlockFile(files, folder / "none", Mode::kRead), FileError);
  EXPECT_THROW(BlockFile(files, folder / "none/x", Mode::kWrite), FileError);
}

}  // namespace
}  // namespace ds::io

// Reads at offsets: any order, any size of file, on disks and where there is no O_DIRECT, with faults on order.
#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <string.h>

#include <algorithm>
#include <map>

#include "../error_of.h"
#include "folder.h"
#include "io/memory/aligned_pool.h"
#include "io/async/async_file.h"
#include "io/faults.h"
#include "io/file_error.h"

namespace ds::io {
namespace {

const char* const kFileSystems[] = {"/tmp", "/dev/shm"};  // O_DIRECT on most disks; none on most tmpfs
constexpr size_t kPiece = 4 * kBlockBytes;

// The error is that of one piece of the file.
void expect_offset(const FileError& e, int code, uint64_t offset) {
  EXPECT_EQ(e.code(), code);
  EXPECT_EQ(e.offset(), offset);
  EXPECT_EQ(e.bytes(), kPiece);
}

class Reads : public testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  const std::string method_ = std::get<0>(GetParam());
  const Folder folder_{std::get<1>(GetParam())};
  const std::string path_ = folder_ / "x";

  std::unique_ptr<AsyncFile> open(Files& files, const Descriptor& file, int depth) {
    if (method_ == "io_uring") {
      if (auto opened = open_uring(files, file, path_, depth)) return opened;
      return open_libaio(files, file, path_, depth);  // where the machine refuses io_uring: async_file_test says so
    }
    return method_ == "libaio" ? open_libaio(files, file, path_, depth) : open_threaded(files, file, path_);
  }
  // The whole file in pieces, `bytes` of it, last piece first.
  std::string read(Files& files, size_t bytes, bool want_direct = true) {
    bool direct = want_direct;
    const Descriptor file = files.open_part(path_, &direct, /*read=*/true);
    const auto async = open(files, file, 3);
    AlignedPool pool(3, kPiece);
    std::string text(bytes, 'x');
    std::map<char*, size_t> offsets;
    const auto take = [&](char* buffer) {
      const size_t at = offsets.at(buffer);
      memcpy(text.data() + at, buffer, std::min(kPiece, bytes - at));
    };
    for (size_t i = (bytes + kPiece - 1) / kPiece; i-- > 0;) {
      char* buffer = pool.take();
      if (buffer == nullptr) take(buffer = async->wait());
      offsets[buffer] = i * kPiece;
      const size_t least = std::min(kPiece, bytes - i * kPiece);
      async->submit_read(buffer, direct ? round_up(least, kBlockBytes) : least, i * kPiece, least);
    }
    while (char* buffer = async->wait()) take(buffer);
    return text;
  }
  std::string make(size_t bytes) {
    const std::string text = random_bytes(bytes, static_cast<unsigned>(bytes));
    std::ofstream(path_, std::ios::binary) << text;
    return text;
  }
};

TEST_P(Reads, AnySizeOfFile) {
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{4095}, size_t{4096}, size_t{4097}, size_t{100000}, 20 * kPiece}) {
    const std::string text = make(bytes);
    for (bool direct : {true, false}) {
      Files files;
      ASSERT_TRUE(read(files, bytes, direct) == text) << bytes;
    }
  }
}

TEST_P(Reads, ShortReadsAndInterruptionsGoOn) {
  for (size_t bytes : {size_t{4097}, size_t{100001}}) {
    const std::string text = make(bytes);
    for (const char* order : {"read:1:short", "read:3:short,read:4:short,read:5:short", "read:1:eintr,read:2:eintr"}) {
      Files files(order);
      ASSERT_TRUE(read(files, bytes) == text) << bytes << " " << order;
    }
  }
}

TEST_P(Reads, AFaultNamesFileOffsetAndBytes) {
  make(5 * kPiece);
  for (int n = 1; n <= 5; ++n) {
    Files files("read:" + std::to_string(n) + ":eio");
    const FileError e = thrown<FileError>([&] { read(files, 5 * kPiece); });
    expect_offset(e, EIO, static_cast<uint64_t>(5 - n) * kPiece);
    EXPECT_EQ(e.path(), path_);
    const std::string range = "(" + std::to_string(kPiece) + " bytes at byte " + std::to_string(e.offset()) + ")";
    EXPECT_TRUE(says(e.what(), "read of " + path_ + " failed: Input/output error " + range));
  }
}

TEST_P(Reads, AFileThatEndsTooEarlyIsAnError) {
  for (size_t missing : {size_t{1}, size_t{4000}, kPiece, 3 * kPiece + 5}) {
    const size_t bytes = 5 * kPiece;
    make(bytes - missing);
    Files files;
    const FileError e = thrown<FileError>([&] { read(files, bytes); });
    expect_offset(e, ENODATA, 4 * kPiece);
    EXPECT_TRUE(says(e.what(), path_ + " failed: the file ends at byte "));
  }
}

TEST_P(Reads, WritesAndReadsOfOneFileShareAnObject) {
  Files files("read:2:short,write:2:short");
  bool direct = true;
  const Descriptor file = files.open_part(path_, &direct, /*read=*/true);
  const auto async = open(files, file, 2);
  AlignedPool pool(2, kPiece);
  char* a = pool.take();
  char* b = pool.take();
  for (int round = 0; round < 3; ++round) {
    memset(a, 'a' + round, kPiece);
    async->submit_write(a, kPiece, static_cast<uint64_t>(round) * kPiece);
    ASSERT_EQ(async->wait(), a);
    memset(a, 0, kPiece);
    async->submit_read(b, kPiece, static_cast<uint64_t>(round) * kPiece, kPiece);
    ASSERT_EQ(async->wait(), b);
    EXPECT_EQ(std::string(b, kPiece), std::string(kPiece, static_cast<char>('a' + round)));
  }
}

TEST_P(Reads, WriteFaultsNameTheOffsetToo) {
  Files files("write:2:enospc");
  bool direct = true;
  const Descriptor file = files.open_part(path_, &direct, /*read=*/true);
  const auto async = open(files, file, 2);
  AlignedPool pool(2, kPiece);
  const FileError e = thrown<FileError>([&] {
    for (size_t at : {size_t{0}, kPiece}) async->submit_write(pool.take(), kPiece, at);
    while (async->wait() != nullptr) {
    }
  });
  expect_offset(e, ENOSPC, kPiece);
  EXPECT_TRUE(says(e.what(), "The file needs " + std::to_string(2 * kPiece) + " bytes"));
}

INSTANTIATE_TEST_SUITE_P(AsyncFile, Reads,
                         testing::Combine(testing::Values("io_uring", "libaio", "pwrite"),
                                          testing::ValuesIn(kFileSystems)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) == std::string("/tmp") ? "OnDisk" : "OnTmpfs");
                         });

TEST(Faults, OrdersOfReads) {
  EXPECT_EQ(Faults::short_read(1), 1u);
  EXPECT_EQ(Faults::short_read(4096), 4096u);
  EXPECT_EQ(Faults::short_read(4097), 4096u);
  EXPECT_EQ(Faults::short_read(40960), 20480u);
  EXPECT_THROW(Faults("open:1:short"), Error);
}

}  // namespace
}  // namespace ds::io

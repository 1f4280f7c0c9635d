#include "io/async_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <string.h>

#include "folder.h"
#include "io/aligned_pool.h"
#include "io/file_error.h"

namespace ds::io {
namespace {

TEST(AlignedPool, AddressesAndSizesSuitDirectWrites) {
  AlignedPool pool(3, 5000);
  EXPECT_EQ(pool.buffer_bytes(), 8192u);
  std::vector<char*> taken;
  while (char* buffer = pool.take()) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer) % kBlockBytes, 0u);
    memset(buffer, 7, pool.buffer_bytes());
    taken.push_back(buffer);
  }
  EXPECT_EQ(taken.size(), 3u);
  pool.give_back(taken[1]);
  EXPECT_EQ(pool.take(), taken[1]);
}

class Both : public testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<AsyncFile> open(Files& files, const Descriptor& file, const std::string& path, int depth) {
    return GetParam() == std::string("libaio") ? open_libaio(files, file, path, depth)
                                               : open_threaded(files, file, path);
  }
};

TEST_P(Both, WritesInAnyOrder) {
  const Folder folder;
  Files files;
  bool direct = true;
  const Descriptor file = files.create(folder / "x", &direct);
  AlignedPool pool(4, kBlockBytes);
  const auto async = open(files, file, folder / "x", 4);
  ASSERT_NE(async, nullptr);
  EXPECT_STREQ(async->name(), GetParam());
  EXPECT_EQ(async->wait(), nullptr);
  for (int i : {3, 0, 2, 1}) {
    char* buffer = pool.take();
    memset(buffer, 'a' + i, kBlockBytes);
    async->submit(buffer, kBlockBytes, static_cast<uint64_t>(i) * kBlockBytes);
  }
  int done = 0;
  while (async->wait() != nullptr) ++done;
  EXPECT_EQ(done, 4);
  const std::string text = content(folder / "x");
  ASSERT_EQ(text.size(), 4 * kBlockBytes);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(text[i * kBlockBytes], static_cast<char>('a' + i));
}

TEST_P(Both, AnErrorOfTheSystemComesOut) {
  const Folder folder;
  Files files;
  {
    bool direct = false;
    files.create(folder / "x", &direct);
  }
  const Descriptor reading(::open((folder / "x").c_str(), O_RDONLY));  // every write is EBADF
  AlignedPool pool(1, kBlockBytes);
  const auto async = open(files, reading, folder / "x", 1);
  char* buffer = pool.take();
  EXPECT_THROW(
      {
        async->submit(buffer, kBlockBytes, 0);
        async->wait();
      },
      FileError);
}

INSTANTIATE_TEST_SUITE_P(AsyncFile, Both, testing::Values("libaio", "pwrite"),
                         [](const auto& info) { return std::string(info.param); });

TEST(AsyncFile, WithoutDirectOrContextAThreadWrites) {
  const Folder folder("/dev/shm");
  Files files;
  bool direct = false;
  const Descriptor file = files.create(folder / "x", &direct);
  EXPECT_STREQ(open_async(files, file, folder / "x", false, 2)->name(), "pwrite");
  EXPECT_EQ(open_libaio(files, file, folder / "x", 1 << 30), nullptr);  // more than any kernel gives
  EXPECT_STREQ(open_async(files, file, folder / "x", true, 1 << 30)->name(), "pwrite");
}

TEST(Files, WriteAllTurnsDirectOffWhereTheAlignmentIsRefused) {
  const Folder folder;
  Files files;
  bool direct = true;
  const Descriptor file = files.create(folder / "x", &direct);
  const std::string text = random_bytes(1001);
  files.write_all(file, folder / "x", text.data() + 1, 1000, 0);  // odd address, odd size
  EXPECT_EQ(content(folder / "x"), text.substr(1));
}

}  // namespace
}  // namespace ds::io

#include "io/async/async_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <string.h>

#include "../error_of.h"
#include "folder.h"
#include "forbid.h"
#include "io/async/aio_contexts.h"
#include "io/memory/aligned_pool.h"
#include "io/file_error.h"
#include "io/file_stream.h"
#include "uring.h"

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
    const std::string method = GetParam();
    if (method == "io_uring") return open_uring(files, file, path, depth);
    return method == "libaio" ? open_libaio(files, file, path, depth) : open_threaded(files, file, path);
  }
  void SetUp() override {
    if (GetParam() == std::string("io_uring") && !has_uring()) GTEST_SKIP() << "this machine refuses io_uring";
  }
};

TEST_P(Both, WritesInAnyOrder) {
  const Folder folder;
  Files files;
  const Descriptor file = created(files, folder / "x");
  AlignedPool pool(4, kBlockBytes);
  const auto async = open(files, file, folder / "x", 4);
  ASSERT_NE(async, nullptr);
  EXPECT_STREQ(async->name(), GetParam());
  EXPECT_EQ(async->wait(), nullptr);
  for (int i : {3, 0, 2, 1}) {
    char* buffer = pool.take();
    memset(buffer, 'a' + i, kBlockBytes);
    async->submit_write(buffer, kBlockBytes, static_cast<uint64_t>(i) * kBlockBytes);
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
  created(files, folder / "x", false);
  const Descriptor reading(::open((folder / "x").c_str(), O_RDONLY));  // every write is EBADF
  AlignedPool pool(1, kBlockBytes);
  const auto async = open(files, reading, folder / "x", 1);
  char* buffer = pool.take();
  EXPECT_THROW(
      {
        async->submit_write(buffer, kBlockBytes, 0);
        async->wait();
      },
      FileError);
}

INSTANTIATE_TEST_SUITE_P(AsyncFile, Both, testing::Values("io_uring", "libaio", "pwrite"),
                         [](const auto& info) { return std::string(info.param); });

TEST(AsyncFile, WithoutDirectOrContextAThreadWrites) {
  const Folder folder("/dev/shm");
  Files files;
  const Descriptor file = created(files, folder / "x", false);
  EXPECT_STREQ(open_async(files, file, folder / "x", false, 2)->name(), "pwrite");
}

TEST(AioContexts, AreKeptForTheNextFile) {
  AioContexts contexts;
  io_context* first = contexts.take();
  io_context* second = contexts.take();
  ASSERT_NE(first, nullptr);
  EXPECT_NE(first, second);
  contexts.give_back(second);
  EXPECT_EQ(contexts.take(), second);
  contexts.give_back(first);
  contexts.give_back(second);
}

TEST(AioContexts, AForkHasItsOwn) {
  const Folder folder;
  Files files;
  const std::string text = random_bytes(9 << 20);
  const auto write = [&](const std::string& name) {
    FileStream stream(files, folder / name, text.size(), {});
    stream.write(text.data(), text.size());
    stream.finish();
    return content(folder / name) == text;
  };
  EXPECT_TRUE(write("a"));
  EXPECT_EQ(exit_code_of([&] { return write("b") ? 0 : 1; }), 0);
  EXPECT_TRUE(write("c"));
}

// A call that a container's seccomp filter refuses is not made again.
TEST(AsyncFile, WithoutIoUringLibaioTransfers) {
  const Folder folder;
  EXPECT_EXIT(
      {
        if (!forbid(SYS_io_uring_setup)) _exit(2);
        Files files;
        const Descriptor file = created(files, folder / "x");
        const bool other = open_async(files, file, folder / "x", true, 4)->name() == std::string("libaio");
        const std::string why = error_of([&] {
          open_async(files, file, folder / "x", true, 4, {Backend::kUring, false, 1});
        });
        const bool named = why.find("refuses io_uring (io_uring_setup: Function not implemented)") != std::string::npos;
        _exit(other && (named || why.find("built without liburing") != std::string::npos) ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(AsyncFile, ABackendByItsName) {
  EXPECT_EQ(backend_named(""), Backend::kAuto);
  EXPECT_EQ(backend_named("auto"), Backend::kAuto);
  EXPECT_EQ(backend_named("io_uring"), Backend::kUring);
  EXPECT_EQ(backend_named("libaio"), Backend::kLibaio);
  EXPECT_EQ(backend_named("threads"), Backend::kThreads);
  EXPECT_THROW(backend_named("aio"), Error);
}

TEST(AioContexts, WithoutOneAThreadWrites) {
  const Folder folder;
  const std::string text = random_bytes(9 << 20);
  EXPECT_EXIT(
      {
        if (!forbid(SYS_io_setup) || !forbid(SYS_io_uring_setup)) _exit(2);
        Files files;
        FileStream stream(files, folder / "x", text.size(), {});
        const bool threaded = stream.method() == std::string("pwrite");
        stream.write(text.data(), text.size());
        stream.finish();
        _exit(threaded && content(folder / "x") == text ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(Files, WriteAllTurnsDirectOffWhereTheAlignmentIsRefused) {
  const Folder folder;
  Files files;
  const Descriptor file = created(files, folder / "x");
  const std::string text = random_bytes(1001);
  files.write_all(file, folder / "x", text.data() + 1, 1000, 0);  // odd address, odd size
  EXPECT_EQ(content(folder / "x"), text.substr(1));
}

}  // namespace
}  // namespace ds::io

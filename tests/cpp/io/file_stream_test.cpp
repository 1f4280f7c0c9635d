#include "io/file_stream.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "../error_of.h"
#include "../on_threads.h"
#include "folder.h"
#include "io/file_error.h"

namespace ds::io {
namespace {

const char* const kFileSystems[] = {"/tmp", "/dev/shm"};  // O_DIRECT on most disks; none on most tmpfs

StreamOptions small(size_t buffer_bytes, int buffers = 2, int threads = 1, bool direct = true) {
  StreamOptions options;
  options.buffer_bytes = buffer_bytes;
  options.buffers = buffers;
  options.threads = threads;
  options.direct = direct;
  options.sync = false;  // as the tests that need it say themselves: it is most of the time of a small file
  return options;
}

// One write of all of `text` into a file from which `expected` bytes are expected.
Sum write_file(Files& files, const std::string& path, const std::string& text, uint64_t expected,
               const StreamOptions& options) {
  FileStream stream(files, path, expected, options);
  stream.write(text.data(), text.size());
  return stream.finish();
}

TEST(FileStream, WritesWhatItIsGiven) {
  for (const char* parent : kFileSystems) {
    const Folder folder(parent);
    Files files;
    for (size_t bytes : {0, 1, 4095, 4096, 4097, 1048577, 3000001}) {
      const std::string text = random_bytes(bytes, static_cast<unsigned>(bytes));
      const uint32_t expected = plain_crc32(text);
      for (bool known : {false, true}) {
        for (bool direct : {false, true}) {
          for (int buffers : {1, 3}) {
            FileStream stream(files, folder / "x", known ? bytes : 0, small(1 << 20, buffers, buffers, direct));
            const uint32_t sum = stream.write(text.data(), bytes);
            const Sum total = stream.finish();
            EXPECT_EQ(total.bytes, bytes);
            EXPECT_EQ(total.crc32, expected);
            EXPECT_EQ(sum, total.crc32);
            ASSERT_EQ(content(folder / "x"), text) << parent << " " << bytes << " " << known << direct << buffers;
          }
        }
      }
    }
  }
}

TEST(FileStream, ManyWritesOfOddSizesAreOneFile) {
  const Folder folder;
  Files files;
  const std::string text = random_bytes(5000000);
  FileStream stream(files, folder / "x", text.size(), small(100000, 2, 3));
  size_t at = 0;
  for (size_t step = 1; at < text.size(); step = step * 7 % 1000003) {
    const size_t now = std::min(step, text.size() - at);
    EXPECT_EQ(stream.write(text.data() + at, now), plain_crc32(text.substr(at, now)));
    at += now;
    EXPECT_EQ(stream.position(), at);
  }
  EXPECT_EQ(stream.finish().crc32, plain_crc32(text));
  EXPECT_EQ(content(folder / "x"), text);
}

TEST(FileStream, AMappedFileIsWrittenOverWithItsPages) {
  const Folder folder("/dev/shm");
  Files files;
  StreamOptions options = small(1 << 20, 1, 3, /*direct=*/false);
  options.mapped = true;
  struct stat first;
  for (size_t bytes : {5000000, 5000000, 3000001, 6000000, 1}) {
    const std::string text = random_bytes(bytes, static_cast<unsigned>(bytes));
    FileStream stream(files, folder / "x", bytes, options);
    for (size_t at = 0, step = 1; at < bytes; step = step * 7 % 4000037) {
      const size_t now = std::min(step, bytes - at);
      EXPECT_EQ(stream.write(text.data() + at, now), plain_crc32(text.substr(at, now)));
      at += now;
    }
    EXPECT_STREQ(stream.method(), "mapped");
    EXPECT_EQ(stream.finish().crc32, plain_crc32(text));
    ASSERT_EQ(content(folder / "x"), text);
    struct stat found;
    ASSERT_EQ(::stat((folder / "x").c_str(), &found), 0);
    if (bytes != 5000000) {
      EXPECT_EQ(found.st_ino, first.st_ino);
    }
    first = found;
  }
  FileStream less(files, folder / "x", 5000, options);
  less.write("abc", 3);
  less.finish();
  EXPECT_EQ(content(folder / "x"), "abc");
  FileStream(files, folder / "empty", 0, options).finish();
  EXPECT_EQ(content(folder / "empty"), "");
}

TEST(FileStream, AMappedFileTakesNoMoreThanWasExpectedAndGoesWhenItIsGivenUp) {
  const Folder folder("/dev/shm");
  Files files;
  StreamOptions options = small(1 << 20, 1, 1, /*direct=*/false);
  options.mapped = true;
  {
    FileStream stream(files, folder / "x", 5, options);
    EXPECT_THROW(stream.write("123456", 6), Error);
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "x"));
  EXPECT_THROW(FileStream(files, folder / "x", uint64_t{1} << 55, options), FileError);
  EXPECT_FALSE(std::filesystem::exists(folder / "x"));
  options.direct = true;
  EXPECT_THROW(FileStream(files, folder / "x", 5, options), Error);
}

TEST(FileStream, MoreOrLessThanExpectedIsStillTheFile) {
  const Folder folder;
  Files files;
  const std::string text = random_bytes(3000000);
  for (uint64_t expected : {uint64_t{100}, uint64_t{2000000}, uint64_t{9000000}}) {
    EXPECT_EQ(write_file(files, folder / "x", text, expected, small(1 << 20)).bytes, text.size());
    ASSERT_EQ(content(folder / "x"), text);
  }
}

TEST(FileStream, AnOlderLongerFileLeavesNothing) {
  const Folder folder;
  Files files;
  for (size_t bytes : {5000000, 10}) write_file(files, folder / "x", random_bytes(bytes), bytes, small(1 << 20));
  EXPECT_EQ(content(folder / "x").size(), 10u);
}

TEST(FileStream, AShortWriteIsCompleted) {
  for (const char* parent : kFileSystems) {
    const Folder folder(parent);
    const std::string text = random_bytes(7000001);
    for (int n = 1; n <= 8; ++n) {
      Files files("write:" + std::to_string(n) + ":short");
      write_file(files, folder / "x", text, text.size(), small(1 << 20));
      ASSERT_EQ(content(folder / "x"), text) << parent << " " << n;
    }
  }
}

TEST(FileStream, WithoutFtruncateTheFileHasItsSizeAllTheSame) {
  for (const char* parent : kFileSystems) {
    for (size_t bytes : {size_t{0}, size_t{5}, size_t{4097}, size_t{5000001}}) {
      const Folder folder(parent);
      const std::string text = random_bytes(bytes);
      std::ofstream(folder / "x") << std::string(9000000, 'o');
      Files files("truncate:1+:enotsup");
      FileStream stream(files, folder / "x", text.size(), small(1 << 20));
      EXPECT_FALSE(stream.direct());
      stream.write(text.data(), text.size());
      stream.finish();
      EXPECT_EQ(content(folder / "x"), text) << parent << " " << bytes;
    }
  }
}

TEST(FileStream, EveryFaultIsAnErrorThatNamesTheFileAndLeavesNone) {
  for (const char* parent : kFileSystems) {
    const Folder folder(parent);
    const std::string text = random_bytes(5000001);
    for (const char* call : {"open", "write", "fsync"}) {
      for (const char* action : {"enospc", "eio"}) {
        int faults = 0;
        for (int n = 1;; ++n) {
          ASSERT_LT(n, 100);
          Files files(std::string(call) + ":" + std::to_string(n) + ":" + action);
          try {
            StreamOptions options = small(1 << 20);
            options.sync = true;
            write_file(files, folder / "x", text, text.size(), options);
            break;
          } catch (const FileError& e) {
            ++faults;
            EXPECT_EQ(e.code(), action == std::string("eio") ? EIO : ENOSPC);
            EXPECT_TRUE(says(e.what(), folder / "x"));
            if (e.code() == ENOSPC) {
              EXPECT_TRUE(says(e.what(), "bytes are free"));
            }
            EXPECT_EQ(folder.entries(), 0u) << call << n;
          }
        }
        EXPECT_EQ(faults, call == std::string("write") ? 5 : 1) << call;
        std::filesystem::remove(folder / "x");
      }
    }
  }
}

TEST(FileStream, AFullDiskIsAnErrorBeforeAnythingIsWritten) {
  const Folder folder("/dev/shm");
  Files files("write:1:kill");  // no write may happen
  const FileError e =
      thrown<FileError>([&] { FileStream stream(files, folder / "x", uint64_t{1} << 50, small(1 << 20)); });
  EXPECT_EQ(e.code(), ENOSPC);
  EXPECT_TRUE(says(e.what(), "needs 1125899906842624 bytes"));
  EXPECT_EQ(folder.entries(), 0u);
}

TEST(FileStream, ALimitOfTheSystemInTheMiddleIsAnError) {
  const Folder folder;
  const std::string text = random_bytes(3000000);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit = before;
  limit.rlim_cur = 2 << 20;
  setrlimit(RLIMIT_FSIZE, &limit);
  Files files;
  const int code = thrown<FileError>([&] { write_file(files, folder / "x", text, 0, small(1 << 20)); }).code();
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(code, EFBIG);
  EXPECT_EQ(folder.entries(), 0u);
}

TEST(FileStream, AKillTearsTheWrite) {
  const Folder folder;
  EXPECT_EXIT(
      {
        Files files("write:2:kill");
        write_file(files, folder / "x", random_bytes(4 << 20), 4 << 20, small(1 << 20));
      },
      testing::KilledBySignal(SIGKILL), "");
  const std::string text = content(folder / "x");
  EXPECT_TRUE(std::filesystem::exists(folder / "x"));
  EXPECT_NE(text, random_bytes(4 << 20));
}

TEST(FileStream, GivenUpItIsGone) {
  const Folder folder;
  Files files;
  const std::string text = random_bytes(3000000);
  {
    FileStream stream(files, folder / "x", text.size(), small(1 << 20));
    stream.write(text.data(), text.size());
  }
  EXPECT_EQ(folder.entries(), 0u);
  FileStream stream(files, folder / "x", text.size(), small(1 << 20));
  stream.abandon();
  EXPECT_EQ(folder.entries(), 0u);
  EXPECT_THROW(stream.write(text.data(), 1), Error);
  EXPECT_THROW(stream.finish(), Error);
}

TEST(FileStream, LeavesNoDescriptorOpen) {
  const Folder folder;
  const size_t before = open_descriptors();
  for (int i = 0; i < 20; ++i) {
    Files files(i % 2 ? "write:3:eio" : "");
    try {
      write_file(files, folder / "x", std::string(4 << 20, 'x'), 4 << 20, small(1 << 20));
    } catch (const FileError&) {
    }
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(FileStream, SeveralAtATime) {
  const Folder folder;
  Files files;
  on_threads(8, [&](int i) {
    const std::string text = random_bytes(3000000, static_cast<unsigned>(i));
    write_file(files, folder / std::to_string(i), text, text.size(), small(1 << 19, 2, 2));
  });
  for (int i = 0; i < 8; ++i)
    EXPECT_EQ(content(folder / std::to_string(i)), random_bytes(3000000, static_cast<unsigned>(i)));
}

TEST(FileStream, RefusesOptionsOutOfRange) {
  const Folder folder;
  Files files;
  EXPECT_THROW(FileStream(files, folder / "x", 0, small(0)), Error);
  EXPECT_THROW(FileStream(files, folder / "x", 0, small(size_t{2} << 30)), Error);
  EXPECT_THROW(FileStream(files, folder / "x", 0, small(1 << 20, 0)), Error);
  EXPECT_THROW(FileStream(files, folder / "x", 0, small(1 << 20, 2, 0)), Error);
  EXPECT_EQ(folder.entries(), 0u);
}

TEST(FileStream, TheSystemsReasonAndTheFixAreInTheError) {
  Files files;
  const FileError e = thrown<FileError>([&] { FileStream stream(files, "/nowhere/at/all", 10, small(1 << 20)); });
  EXPECT_EQ(e.code(), ENOENT);
  EXPECT_STREQ(e.what(),
               "open for writing of /nowhere/at/all failed: No such file or directory. Make the folder /nowhere/at "
               "first, or correct the path.");
}

}  // namespace
}  // namespace ds::io

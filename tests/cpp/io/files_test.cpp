#include "io/files.h"

#include <errno.h>
#include <gtest/gtest.h>

#include <csignal>

#include "../error_of.h"
#include "folder.h"
#include "forbid.h"
#include "io/faults.h"
#include "io/file_error.h"
#include "io/folders/paths.h"

namespace ds::io {
namespace {

void put(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

TEST(Paths, ParentFolder) {
  EXPECT_EQ(parent_folder("a"), ".");
  EXPECT_EQ(parent_folder("/a"), "/");
  EXPECT_EQ(parent_folder("/a/b"), "/a");
  EXPECT_EQ(parent_folder("a/b/c"), "a/b");
}

TEST(Faults, ReadsOrders) {
  for (const char* good : {"", "write:1:kill", "open:12:eio", "fsync:3:enospc", "rename:1:kill", "write:2:short",
                           "exchange:1+:einval", "rename_dir:1+:exdev,truncate:1+:enotsup,rename:2:kill"}) {
    EXPECT_NO_THROW(Faults{good}) << good;
  }
  for (const char* bad :
       {"x", "write", "write:1", "write::kill", "write:0:kill", "write:-1:kill", "write:1:boom", ":1:kill",
        "close:1:kill", "fsync:1:short", "write:1x:kill", "write:1:kill:2", "write:99999999999999999:eio",
        "write:+:eio", "write:1:eio,", ",write:1:eio", "write:1:eio,x"}) {
    EXPECT_THROW(Faults{bad}, Error) << bad;
  }
}

TEST(Faults, ActsAtTheNthCallOnly) {
  Faults faults("fsync:3:eio");
  for (int n = 1; n <= 5; ++n) {
    EXPECT_EQ(faults.count(Call::kWrite).code, 0);
    const Faults::CheckResult verdict = faults.count(Call::kSync);
    EXPECT_EQ(verdict.code, n == 3 ? EIO : 0);
    EXPECT_EQ(verdict.action, n == 3 ? Faults::Action::kError : Faults::Action::kNone);
  }
  faults.arm("fsync:1:enospc");
  EXPECT_EQ(faults.count(Call::kSync).code, ENOSPC);
  EXPECT_THROW(faults.arm("nonsense"), Error);
  faults.arm("");
  EXPECT_EQ(faults.count(Call::kSync).code, 0);
}

TEST(Files, RenameReplaces) {
  const Folder folder;
  Files files;
  put(folder / "a", "new");
  put(folder / "b", "old");
  files.rename(folder / "a", folder / "b");
  EXPECT_EQ(content(folder / "b"), "new");
  EXPECT_EQ(folder.entries(), 1u);
  files.sync_directory(folder.path());
}

TEST(Files, ExchangeSwapsFilesAndFolders) {
  for (const char* parent : {"/tmp", "/dev/shm"}) {
    const Folder folder(parent);
    Files files;
    put(folder / "a", "1");
    std::filesystem::create_directory(folder / "b");
    put(folder / "b/in", "2");
    files.exchange(folder / "a", folder / "b");
    EXPECT_EQ(content(folder / "a/in"), "2");
    EXPECT_EQ(content(folder / "b"), "1");
    EXPECT_EQ(folder.entries(), 2u);
  }
}

TEST(Faults, SeveralOrdersAndFromACallOn) {
  Faults faults("fsync:2+:eio,write:1:enospc,fsync:4:kill");
  EXPECT_EQ(faults.count(Call::kWrite).code, ENOSPC);
  EXPECT_EQ(faults.count(Call::kWrite).code, 0);
  EXPECT_EQ(faults.count(Call::kSync).code, 0);
  for (int n = 2; n <= 5; ++n) EXPECT_EQ(faults.count(Call::kSync).code, EIO) << n;  // the first that applies acts
}

TEST(Files, AKernelWithoutTheSystemCallExchangesNothing) {
  const Folder folder;
  put(folder / "a", "1");
  put(folder / "b", "2");
  EXPECT_EXIT(
      {
        if (!forbid(SYS_renameat2)) _exit(2);
        Files files;
        _exit(files.exchange(folder / "a", folder / "b") ? 1 : 0);
      },
      testing::ExitedWithCode(0), "");
  for (const char* code : {"einval", "enosys", "enotsup"}) {
    Files files(std::string("exchange:1+:") + code);
    EXPECT_FALSE(files.exchange(folder / "a", folder / "b")) << code;
  }
  EXPECT_EQ(content(folder / "a"), "1");
  EXPECT_EQ(content(folder / "b"), "2");
}

TEST(Files, FoldersThatCannotBeRenamed) {
  const Folder folder;
  std::filesystem::create_directory(folder / "d");
  put(folder / "a", "1");
  Files files("rename_dir:1+:exdev");
  files.rename(folder / "a", folder / "b");
  EXPECT_EQ(thrown<FileError>([&] { files.rename(folder / "d", folder / "e"); }).code(), EXDEV);
  EXPECT_THROW(files.exchange(folder / "d", folder / "b"), FileError);
  EXPECT_TRUE(std::filesystem::is_directory(folder / "d"));
}

TEST(Files, WithoutFtruncateAFileIsMadeAnewAndNotDirect) {
  for (const char* code : {"enosys", "enotsup", "einval", "eperm"}) {
    const Folder folder;
    put(folder / "x", "an older and longer one");
    Files files(std::string("truncate:1+:") + code);
    bool direct = true;
    bool resizable = true;
    const Descriptor file = files.create(folder / "x", &direct, &resizable);
    EXPECT_FALSE(direct || resizable) << code;
    files.write_all(file, folder / "x", "new", 3, 0);
    EXPECT_EQ(content(folder / "x"), "new");
    EXPECT_THROW(files.truncate(file, folder / "x", 2), FileError);
  }
  const Folder folder;
  Files files("truncate:1:eio");
  bool direct = false;
  bool resizable = false;
  EXPECT_THROW(files.create(folder / "x", &direct, &resizable), FileError);
}

TEST(Files, AFileSystemThatCannotReserveIsAskedWhatIsFree) {
  const Folder folder;
  EXPECT_EXIT(
      {
        if (!forbid(SYS_fallocate)) _exit(2);
        Files files;
        bool direct = false;
        bool resizable = true;
        const Descriptor file = files.create(folder / "x", &direct, &resizable);
        files.reserve(file, folder / "x", 4096);
        const FileError e = thrown<FileError>([&] { files.reserve(file, folder / "x", uint64_t{1} << 60); });
        _exit(e.code() == ENOSPC ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(Files, FaultsOfRenameAndFolderSync) {
  const Folder folder;
  put(folder / "a", "1");
  put(folder / "b", "2");
  Files files("rename:1:eio");
  EXPECT_THROW(files.rename(folder / "a", folder / "b"), FileError);
  EXPECT_EQ(content(folder / "b"), "2");
  files.inject("rename:1:enospc");
  EXPECT_THROW(files.exchange(folder / "a", folder / "b"), FileError);
  EXPECT_EQ(content(folder / "b"), "2");
  files.inject("fsync:1:eio");
  EXPECT_THROW(files.sync_directory(folder.path()), FileError);
  EXPECT_NO_THROW(files.sync_directory(folder.path()));
}

TEST(Files, ErrorsNameBothFiles) {
  const Folder folder;
  Files files;
  for (bool swap : {false, true}) {
    const FileError e = thrown<FileError>([&] {
      swap ? static_cast<void>(files.exchange(folder / "none", folder / "b"))
           : files.rename(folder / "none", folder / "b");
    });
    EXPECT_EQ(e.code(), ENOENT);
    EXPECT_TRUE(says(e.what(), "none"));
    EXPECT_TRUE(says(e.what(), folder / "b"));
  }
  EXPECT_THROW(files.sync_directory(folder / "none"), FileError);
}

}  // namespace
}  // namespace ds::io

#include "io/files.h"

#include <errno.h>
#include <gtest/gtest.h>

#include <csignal>

#include "folder.h"
#include "io/file_error.h"
#include "io/paths.h"

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
  for (const char* good : {"", "write:1:kill", "open:12:eio", "fsync:3:enospc", "rename:1:kill", "write:2:short"}) {
    EXPECT_NO_THROW(Faults{good}) << good;
  }
  for (const char* bad :
       {"x", "write", "write:1", "write::kill", "write:0:kill", "write:-1:kill", "write:1:boom", ":1:kill",
        "read:1:kill", "fsync:1:short", "write:1x:kill", "write:1:kill:2", "write:99999999999999999:eio"}) {
    EXPECT_THROW(Faults{bad}, Error) << bad;
  }
}

TEST(Faults, ActsAtTheNthCallOnly) {
  Faults faults("fsync:3:eio");
  for (int n = 1; n <= 5; ++n) {
    EXPECT_EQ(faults.count(Call::kWrite).code, 0);
    const Faults::Verdict verdict = faults.count(Call::kSync);
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

TEST(Files, ExchangeWithoutTheSystemCallIsThreeRenames) {
  const Folder folder;
  Files files;
  put(folder / "a", "1");
  std::filesystem::create_directory(folder / "b");
  put(folder / "b/in", "2");
  files.exchange_by_renames(folder / "a", folder / "b");
  EXPECT_EQ(content(folder / "a/in"), "2");
  EXPECT_EQ(content(folder / "b"), "1");
  EXPECT_EQ(folder.entries(), 2u);
  put(folder / "b.exchange", "left by a crash");
  EXPECT_THROW(files.exchange_by_renames(folder / "a", folder / "b"), FileError);
  EXPECT_EQ(content(folder / "b"), "1");
}

TEST(Files, ACrashBetweenTheRenamesLosesNothing) {
  for (int n = 1; n <= 3; ++n) {
    const Folder folder;
    put(folder / "a", "1");
    put(folder / "b", "2");
    EXPECT_EXIT(
        {
          Files files("rename:" + std::to_string(n) + ":kill");
          files.exchange_by_renames(folder / "a", folder / "b");
        },
        testing::KilledBySignal(SIGKILL), "");
    std::string all;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) all += content(entry.path());
    EXPECT_TRUE(all == "12" || all == "21") << all;
  }
}

TEST(Files, FaultsOfRenameAndFolderSync) {
  const Folder folder;
  put(folder / "a", "1");
  put(folder / "b", "2");
  Files files("rename:1:eio");
  EXPECT_THROW(files.rename(folder / "a", folder / "b"), FileError);
  EXPECT_EQ(content(folder / "b"), "2");
  files.faults().arm("rename:1:enospc");
  EXPECT_THROW(files.exchange(folder / "a", folder / "b"), FileError);
  EXPECT_EQ(content(folder / "b"), "2");
  files.faults().arm("fsync:1:eio");
  EXPECT_THROW(files.sync_directory(folder.path()), FileError);
  EXPECT_NO_THROW(files.sync_directory(folder.path()));
}

TEST(Files, ErrorsNameBothFiles) {
  const Folder folder;
  Files files;
  for (bool swap : {false, true}) {
    try {
      swap ? static_cast<void>(files.exchange(folder / "none", folder / "b"))
           : files.rename(folder / "none", folder / "b");
      FAIL();
    } catch (const FileError& e) {
      EXPECT_EQ(e.code(), ENOENT);
      EXPECT_NE(std::string(e.what()).find("none"), std::string::npos);
      EXPECT_NE(std::string(e.what()).find(folder / "b"), std::string::npos);
    }
  }
  EXPECT_THROW(files.sync_directory(folder / "none"), FileError);
}

}  // namespace
}  // namespace ds::io

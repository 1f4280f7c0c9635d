#include "io/folders/run_folder.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "../error_of.h"
#include "base/error.h"
#include "folder.h"
#include "io/folders/swap_files.h"

namespace ds::io {
namespace {

const std::vector<std::string> kOwned = {"float32params/rank0", "optimizer/rank0"};

void leave_files(const std::string& root) {
  for (const std::string& sub : kOwned) {
    std::filesystem::create_directories(root + "/" + sub);
    std::ofstream(root + "/" + sub + "/1_param.tensor.swp") << "left";
  }
}

bool there(const std::string& path) { return std::filesystem::exists(path); }

// As a run does that is killed: it never gives its folder up.
void keep(const std::string& root) {
  new RunFolder(root, "rank0", kOwned);
  leave_files(root);
}

TEST(RunFolder, NothingIsLeftAtItsEnd) {
  const Folder disk;
  const std::string root = disk / "zero_stage_3";
  {
    const RunFolder folder(root, "rank0", kOwned);
    for (const std::string& sub : kOwned) std::filesystem::create_directories(root + "/" + sub);
  }
  EXPECT_EQ(disk.entries(), 0u);
}

TEST(RunFolder, FilesOfALivingRunAreNeverTouchedAndThoseOfAKilledOneGo) {
  const Folder disk;
  const std::string root = disk / "zero_stage_3";
  Lingering other([&] { keep(root); });
  EXPECT_TRUE(says(error_of([&] { const RunFolder folder(root, "rank0", kOwned); }),
                   root + " is in use: process " + std::to_string(other.pid())));
  const RunFolder neighbour(root, "rank1", {"float32params/rank1"});  // another rank's has nothing to do with it
  for (const std::string& sub : kOwned) EXPECT_TRUE(there(root + "/" + sub + "/1_param.tensor.swp"));
  other.kill();
  const RunFolder folder(root, "rank0", kOwned);
  for (const std::string& sub : kOwned) EXPECT_FALSE(there(root + "/" + sub + "/1_param.tensor.swp"));
}

TEST(RunFolder, SeveralOfOneProcessShareIt) {
  const Folder disk;
  const std::string root = disk / "zero_stage_3";
  auto first = std::make_unique<RunFolder>(root, "rank0", kOwned);
  leave_files(root);
  auto second = std::make_unique<RunFolder>(root, "rank0", kOwned);
  first.reset();
  const RunFolder third(root, "rank0", kOwned);  // the second one's lock says that somebody lives
  EXPECT_TRUE(there(root + "/" + kOwned[0] + "/1_param.tensor.swp"));
}

// Swap files are removed by their own locks; the folder above stays.
TEST(RunFolder, OwnsNoFolderWhereThereAreSwapFiles) {
  const Folder disk;
  const std::string root = disk / "optimizer";
  std::filesystem::create_directories(root);
  leave_files(root);
  RunFolder folder(root, "rank0", {});
  EXPECT_TRUE(there(root + "/" + kOwned[0] + "/1_param.tensor.swp"));
  std::filesystem::remove_all(root + "/float32params");
  std::filesystem::remove_all(root + "/optimizer");
  { const RunFolder other(root, "rank1", {}); }
  folder.close();
  EXPECT_TRUE(std::filesystem::is_empty(root));
}

TEST(RunFolder, FoldersThatCannotBeUsedAreNamed) {
  const Folder disk;
  EXPECT_TRUE(says(error_of([&] { const RunFolder folder(disk / "missing/zero_stage_3", "rank0", kOwned); }),
                   disk / "missing"));
}

// A lock that cannot be opened may be held: nothing is removed. Here it is not a file; a user who is not root meets it
// as another user's lock, and everybody meets it without a free descriptor.
TEST(RunFolder, ALockThatCannotBeOpenedIsHeld) {
  const Folder disk;
  const std::string root = disk / "zero_stage_3";
  std::filesystem::create_directories(root + "/.rank0.1-1.lock.abcdef");
  leave_files(root);
  EXPECT_TRUE(says(error_of([&] { const RunFolder folder(root, "rank0", kOwned); }),
                   "counts as in use: its lock file .rank0.1-1.lock.abcdef cannot be opened"));
  for (const std::string& sub : kOwned) EXPECT_TRUE(there(root + "/" + sub + "/1_param.tensor.swp"));
}

TEST(RunFolder, WithoutFreeDescriptorsNothingIsRemoved) {
  const Folder disk;
  const std::string root = disk / "zero_stage_3";
  std::filesystem::create_directories(root);
  std::ofstream(root + "/.rank0.1-1.lock.abcdef") << "";
  leave_files(root);
  const int failures = exit_code_of([&] {
    std::vector<int> taken;
    for (int next = ::dup(0); next >= 0; next = ::dup(0)) taken.push_back(next);
    // One more each time, so that every open of the constructor fails once.
    for (int failed = 0;; ++failed) {
      ::close(taken.back());
      taken.pop_back();
      try {
        const RunFolder folder(root, "rank0", kOwned);
        ::_exit(failed);
      } catch (const Error&) {
        for (const std::string& sub : kOwned)
          if (!there(root + "/" + sub + "/1_param.tensor.swp")) return 100;
      }
    }
  });
  EXPECT_GT(failures, 1);
  EXPECT_LT(failures, 10);
}

TEST(RunFolder, NothingIsRemovedThroughALink) {
  const Folder disk, other;
  const std::string root = disk / "zero_stage_3";
  std::filesystem::create_directories(root);
  std::filesystem::create_directories(other / "rank0");
  std::ofstream(other / "rank0/1_param.tensor.swp") << "the user's";
  std::filesystem::create_symlink(other.path(), root + "/float32params");
  std::filesystem::create_directories(root + "/optimizer");
  std::filesystem::create_symlink(other / "rank0", root + "/optimizer/rank0");
  std::filesystem::create_directories(other / "empty");
  { const RunFolder folder(root, "rank0", {kOwned[0], kOwned[1], "float32params/empty"}); }
  EXPECT_TRUE(there(other / "rank0/1_param.tensor.swp"));
  EXPECT_TRUE(there(other / "empty"));
  const Folder outside;
  std::ofstream(outside / "1_param.tensor.swp") << "the user's";
  std::filesystem::create_symlink(outside.path(), disk / "linked");
  EXPECT_THROW(RunFolder(disk / "linked", "rank0", {"."}), Error);
  EXPECT_TRUE(there(outside / "1_param.tensor.swp"));
}

TEST(RunFolder, OtherFilesOfItsFoldersStay) {
  const Folder disk;
  const std::string root = disk / "zero_stage_3", sub = root + "/" + kOwned[0];
  leave_files(root);
  std::ofstream(sub + "/2_param.tensor.swp.1") << "left";
  std::ofstream(sub + "/notes.txt") << "the user's";
  { const RunFolder folder(root, "rank0", kOwned); }
  EXPECT_FALSE(there(sub + "/1_param.tensor.swp"));
  EXPECT_FALSE(there(sub + "/2_param.tensor.swp.1"));
  EXPECT_TRUE(there(sub + "/notes.txt"));
}

// ---- two users ------------------------------------------------------------------------------------------------------
bool become(uid_t user) { return ::geteuid() == 0 && ::setresuid(user, user, user) == 0; }

// Another user's run in the same folder: where the test is not root, the same user's under the name of another.
TEST(RunFolder, AnotherUsersFilesAreNeverTouched) {
  const Folder disk;
  ::chmod(disk.path().c_str(), 01777);
  const bool two = exit_code_of([] { return become(60001) ? 0 : 1; }) == 0;
  Lingering first([&] {
    become(60001);
    keep(swap_folder("nvme_path", disk.path(), "zero_stage_3"));
  });
  const std::string file = disk / "zero_stage_3/" + kOwned[0] + "/1_param.tensor.swp";
  const auto other_run = [&] {
    return exit_code_of([&] {
      become(60002);
      try {
        const std::string root = swap_folder("nvme_path", disk.path(), "zero_stage_3");
        const RunFolder folder(root, "rank0", kOwned);
        ::_exit(root == disk / "zero_stage_3.uid60002" ? 1 : 2);
      } catch (const Error&) {
        return 3;
      }
    });
  };
  EXPECT_EQ(other_run(), two ? 1 : 3);
  EXPECT_EQ(content(file), "left");
  first.kill();
  EXPECT_EQ(other_run(), two ? 1 : 2);
  EXPECT_EQ(there(file), two) << "what a killed run has left is its own user's to remove";
}

}  // namespace
}  // namespace ds::io

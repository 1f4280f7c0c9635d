#include "io/run_folder.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include "base/error.h"
#include "folder.h"

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

// A process that keeps the folder until it is killed.
class OtherRun {
 public:
  explicit OtherRun(const std::string& root) {
    int ready[2];
    EXPECT_EQ(::pipe(ready), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      const RunFolder folder(root, "rank0", kOwned);
      leave_files(root);
      EXPECT_EQ(::write(ready[1], "x", 1), 1);
      for (;;) ::pause();
    }
    char byte;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1);
    ::close(ready[0]);
    ::close(ready[1]);
  }
  ~OtherRun() { kill(); }
  void kill() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

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
  OtherRun other(root);
  try {
    const RunFolder folder(root, "rank0", kOwned);
    FAIL() << "two runs in one folder";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(root + " is in use: process " + std::to_string(other.pid())), std::string::npos) << text;
  }
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
  try {
    const RunFolder folder(disk / "missing/zero_stage_3", "rank0", kOwned);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(disk / "missing/zero_stage_3"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace ds::io

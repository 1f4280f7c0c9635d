// Files that end with their process: leftovers of dead ones go, those of living ones stay.
#include "io/swap_files.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "folder.h"
#include "io/file_error.h"

namespace ds::io {
namespace {

bool there(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

TEST(SwapFiles, EndWithTheirOwner) {
  const Folder folder;
  std::string path;
  {
    const SwapFile file(folder.path(), "optimizer states/0");
    path = file.path();
    EXPECT_TRUE(there(path));
    EXPECT_NE(path.find("/optimizer_states_0."), std::string::npos) << path;
    EXPECT_EQ(path.substr(path.size() - 11), SwapFile::kSuffix);
  }
  EXPECT_FALSE(there(path));
  EXPECT_EQ(folder.entries(), 0u);
}

TEST(SwapFiles, OfTheLivingStayAndOfTheDeadGo) {
  const Folder folder;
  const SwapFile mine(folder.path(), "mine");
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    auto* theirs = new SwapFile(folder.path(), "theirs");  // never removed by its owner
    (void)!::write(ready[1], "x", 1);
    (void)theirs;
    ::pause();
    ::_exit(0);
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(remove_leftovers(folder.path()), 0);
  EXPECT_EQ(folder.entries(), 2u);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  { const SwapFile next(folder.path(), "next"); }  // making one removes them
  EXPECT_EQ(folder.entries(), 1u);
  EXPECT_TRUE(there(mine.path()));
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(SwapFiles, FoldersOfUsersHaveToBeThere) {
  const Folder folder;
  const auto code_of = [&](const std::string& base) {
    try {
      swap_folder("section.key", base, "a/b");
    } catch (const FileError& error) {
      EXPECT_NE(std::string(error.what()).find("section.key = \"" + base + "\""), std::string::npos) << error.what();
      return error.code();
    }
    return 0;
  };
  EXPECT_EQ(code_of(folder.path()), 0);
  EXPECT_EQ(swap_folder("section.key", folder.path(), "a/b"), folder.path() + "/a/b");
  EXPECT_TRUE(there(folder.path() + "/a/b"));
  EXPECT_EQ(code_of(folder.path() + "/typo"), ENOENT);
  const Descriptor file(::open((folder.path() + "/file").c_str(), O_CREAT | O_WRONLY, 0600));
  EXPECT_EQ(code_of(folder.path() + "/file"), ENOTDIR);
}

}  // namespace
}  // namespace ds::io

// Files that end with their process: leftovers of dead ones go, those of living ones stay.
#include "io/folders/swap_files.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../error_of.h"
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
    EXPECT_TRUE(says(path, "/optimizer_states_0."));
    EXPECT_EQ(path.substr(path.size() - 11), SwapFile::kSuffix);
  }
  EXPECT_FALSE(there(path));
  EXPECT_EQ(folder.entries(), 0u);
}

TEST(SwapFiles, OfTheLivingStayAndOfTheDeadGo) {
  const Folder folder;
  const SwapFile mine(folder.path(), "mine");
  Lingering other([&] { new SwapFile(folder.path(), "theirs"); });  // never removed by its owner
  EXPECT_EQ(remove_leftovers(folder.path()), 0);
  EXPECT_EQ(folder.entries(), 2u);
  other.kill();
  { const SwapFile next(folder.path(), "next"); }  // making one removes them
  EXPECT_EQ(folder.entries(), 1u);
  EXPECT_TRUE(there(mine.path()));
}

TEST(SwapFiles, FoldersOfUsersAreMadeWithTheirParents) {
  const Folder folder;
  const auto code_of = [&](const std::string& base) {
    try {
      swap_folder("section.key", base, "a/b");
    } catch (const FileError& error) {
      EXPECT_TRUE(says(error.what(), "section.key = \"" + base + "\""));
      return error.code();
    }
    return 0;
  };
  EXPECT_EQ(code_of(folder.path()), 0);
  EXPECT_EQ(swap_folder("section.key", folder.path(), "a/b"), folder.path() + "/a/b");
  EXPECT_TRUE(there(folder.path() + "/a/b"));
  EXPECT_EQ(swap_folder("section.key", folder.path() + "/new/drive", "a"), folder.path() + "/new/drive/a");
  EXPECT_TRUE(there(folder.path() + "/new/drive/a"));
  EXPECT_EQ(code_of(""), ENOENT);
  const Descriptor file(::open((folder.path() + "/file").c_str(), O_CREAT | O_WRONLY, 0600));
  EXPECT_EQ(code_of(folder.path() + "/file"), ENOTDIR);
  EXPECT_EQ(code_of(folder.path() + "/file/below"), ENOTDIR);
}

mode_t rights_of(const std::string& path) {
  struct stat facts;
  EXPECT_EQ(::stat(path.c_str(), &facts), 0) << path;
  return facts.st_mode & 0777;
}

TEST(SwapFiles, OnlyTheirUserCanReadThem) {
  const Folder folder;
  const mode_t before = ::umask(0);
  const std::string path = swap_folder("section.key", folder.path(), "zero_stage_3/optimizer");
  EXPECT_EQ(rights_of(path), 0700u);
  EXPECT_EQ(rights_of(folder.path() + "/zero_stage_3"), 0700u);
  const SwapFile file(path, "states");
  EXPECT_EQ(rights_of(file.path()), 0600u);
  ::chmod(path.c_str(), 0777);  // as an older version left it
  swap_folder("section.key", folder.path(), "zero_stage_3/optimizer");
  EXPECT_EQ(rights_of(path), 0700u);
  ::umask(before);
}

TEST(SwapFiles, LinksAreRefusedAndWhatTheyPointToStays) {
  const Folder folder, other;
  ASSERT_EQ(::symlink(other.path().c_str(), (folder.path() + "/zero_stage_3").c_str()), 0);
  const FileError error =
      thrown<FileError>([&] { swap_folder("section.key", folder.path(), "zero_stage_3/optimizer"); });
  EXPECT_EQ(error.code(), ELOOP);
  EXPECT_TRUE(says(error.what(), "section.key: the folder " + folder.path() + "/zero_stage_3"));
  EXPECT_EQ(other.entries(), 0u);
}

// A file that only looks like one of ours, and a link with such a name, stay.
TEST(SwapFiles, OnlyFilesThatAProcessHasMadeAreRemoved) {
  const Folder folder, other;
  const std::string target = other.path() + "/target", link = folder.path() + "/x.abcdef.tensor.swp";
  for (const std::string& path : {folder.path() + "/weights.tensor.swp", folder.path() + "/x.abc.tensor.swp", target})
    std::ofstream(path) << "mine";
  ASSERT_EQ(::symlink(target.c_str(), link.c_str()), 0);
  std::ofstream(folder.path() + "/x.123abc.tensor.swp") << "left";
  EXPECT_EQ(remove_leftovers(folder.path()), 1);
  EXPECT_EQ(folder.entries(), 3u);
  EXPECT_EQ(content(target), "mine");
}

}  // namespace
}  // namespace ds::io

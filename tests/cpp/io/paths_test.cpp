#include "io/folders/paths.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>

#include "../error_of.h"
#include "base/error.h"
#include "folder.h"

namespace ds::io {
namespace {

namespace fs = std::filesystem;

std::string refused(const Folder& folder, const std::string& name, NameKind kind = NameKind::kPath) {
  return error_of(ErrorKind::kValue, [&] { path_below(folder.path(), name, "manifest.json", kind); });
}

TEST(PathBelowTest, HonestNamesBecomePaths) {
  const Folder folder;
  for (const std::string name : {"a", "a.b.c", "..a", "a..", "...", ".hidden", "sub/a.pt", "a b", "\xc3\xbc"})
    EXPECT_EQ(path_below(folder.path(), name, "m"), folder / name);
  EXPECT_EQ(path_below("", "a", "m"), "a");
  EXPECT_EQ(path_below("/", "a", "m"), "/a");
  EXPECT_EQ(path_below(folder / "not there", "sub/a", "m"), folder / "not there/sub/a");
}

TEST(PathBelowTest, NamesThatLeaveTheFolderAreRefusedWithTheirSource) {
  const Folder folder;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "is empty"},
      {"/etc/passwd", "absolute"},
      {"..", "part '..'"},
      {"../a", "part '..'"},
      {"a/../../b", "'..'"},
      {".", "part '.'"},
      {"a/./b", "part '.'"},
      {"a//b", "part ''"},
      {"a/", "part ''"},
      {"a/..", "part '..'"},
      {std::string("a\0b", 3), "zero byte"},
      {std::string("\0", 1), "zero byte"},
  };
  for (const auto& [name, why] : cases) {
    for (const NameKind kind : {NameKind::kPath, NameKind::kTag}) {
      const std::string text = refused(folder, name, kind);
      EXPECT_TRUE(says(text, "manifest.json has the name '")) << name << ": " << text;
      EXPECT_TRUE(says(text, why));
    }
    EXPECT_NE(refused(folder, name, NameKind::kEntry), "");
    error_of(ErrorKind::kValue, [&, bad = name] { remove_below(folder.path(), bad, "m"); });
  }
  EXPECT_TRUE(says(refused(folder, "\xff\n/.."), "\\xff\\x0a/.."));
  EXPECT_TRUE(says(refused(folder, "a/b", NameKind::kEntry), "one file or folder"));
}

TEST(PathBelowTest, LinksStayInTheFolderUnlessTheNameIsATag) {
  const Folder folder, outside;
  fs::create_directories(folder / "sub/deep");
  std::ofstream(outside / "victim") << "x";
  fs::create_directory_symlink(outside.path(), folder / "out");
  fs::create_symlink(outside / "victim", folder / "file");
  fs::create_symlink("sub", folder / "inner");
  fs::create_symlink("../../inner", folder / "sub/deep/up");
  fs::create_symlink("no such", folder / "dangling");
  fs::create_symlink("loop", folder / "loop");
  for (const std::string name : {"out", "out/victim", "out/new", "file", "sub/deep/up/../x"})
    EXPECT_NE(refused(folder, name), "") << name;
  EXPECT_TRUE(says(refused(folder, "out/victim"), "leaves the folder"));
  EXPECT_TRUE(says(refused(folder, "dangling"), "leads nowhere"));
  EXPECT_TRUE(says(refused(folder, "loop/a"), "leads nowhere"));
  EXPECT_NE(refused(folder, "file", NameKind::kEntry), "");
  EXPECT_EQ(path_below(folder.path(), "inner/deep", "m"), folder / "inner/deep");
  EXPECT_EQ(path_below(folder.path(), "sub/deep/up/deep", "m"), folder / "sub/deep/up/deep");
  EXPECT_EQ(path_below(folder.path(), "out/tag", "m", NameKind::kTag), folder / "out/tag");
  // A folder that is reached by a link is the user's choice; a neighbour whose name begins alike is outside.
  EXPECT_EQ(path_below(folder / "inner", "deep", "m"), folder / "inner/deep");
  fs::create_directory(folder / "subject");
  fs::create_symlink("../subject", folder / "sub/neighbour");
  error_of(ErrorKind::kValue, [&] { path_below(folder / "sub", "neighbour", "m"); });
}

TEST(RemoveBelowTest, OnlyRegularFilesInTheFolderGo) {
  const Folder folder, outside;
  fs::create_directories(folder / "sub");
  for (const std::string& path : {folder / "a", folder / "sub/b", outside / "victim"}) std::ofstream(path) << "x";
  fs::create_directory_symlink(outside.path(), folder / "out");
  fs::create_symlink(outside / "victim", folder / "file");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_TRUE(remove_below(folder.path(), "a", "m"));
  EXPECT_TRUE(remove_below(folder.path(), "sub/b", "m"));
  for (const std::string name : {"a", "sub", "out", "out/victim", "file", "pipe", "none/x"})
    EXPECT_FALSE(remove_below(folder.path(), name, "m")) << name;
  EXPECT_FALSE(remove_below(folder / "none", "x", "m"));
  EXPECT_TRUE(fs::exists(outside / "victim"));
  EXPECT_EQ(folder.entries(), 4u);
}

}  // namespace
}  // namespace ds::io

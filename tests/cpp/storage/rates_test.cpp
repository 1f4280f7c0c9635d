#include "storage/rates.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "../io/folder.h"

namespace ds::storage {
namespace {

Placement at(Medium medium, const std::string& folder = "") {
  Placement placement;
  placement.rest = medium;
  placement.folder = folder;
  return placement;
}

TEST(Rates, AreOfWhatIsReadAndWritten) {
  const io::Folder disk;
  for (const Placement& placement : {at(Medium::kHost), at(Medium::kFile, disk.path())}) {
    const TierRate rate = measure_rate(c10::Device(at::kCPU), placement, {}, 1 << 18);
    EXPECT_GT(rate.read, 0);
    EXPECT_GT(rate.write, 0);
  }
  EXPECT_EQ(disk.entries(), 0u);
}

TEST(Rates, AreMeasuredOnce) {
  const io::Folder disk;
  std::filesystem::create_directory(disk / "drive");
  const c10::Device cpu(at::kCPU);
  for (const Placement& placement : {at(Medium::kHost), at(Medium::kFile, disk / "drive")}) {
    const std::string cache = disk / "cache/of/rates";
    const TierRate first = known_rate(cache, cpu, placement), again = known_rate(cache, cpu, placement);
    EXPECT_NEAR(again.read, first.read, 1.0);
    EXPECT_NEAR(again.write, first.write, 1.0);
    const double changed = known_update_rate(cache, cpu, placement);
    EXPECT_NEAR(known_update_rate(cache, cpu, placement), changed, 1.0);
    for (const auto& entry : std::filesystem::directory_iterator(cache)) std::ofstream(entry.path()) << "123 456\n";
    EXPECT_EQ(known_update_rate(cache, cpu, placement), 123);
    EXPECT_EQ(known_rate(cache, cpu, placement).read, 123);
    EXPECT_EQ(known_rate(cache, cpu, placement).write, 456);
    for (const auto& entry : std::filesystem::directory_iterator(cache)) std::ofstream(entry.path()) << "damaged";
    EXPECT_GT(known_rate(cache, cpu, placement).read, 456);
    std::filesystem::remove_all(cache);
    std::ofstream(disk / "file") << "";
    EXPECT_GT(known_rate(disk / "file/cannot", cpu, placement).read, 0);
  }
}

TEST(Rates, AreKeptInFilesOfThisUserAlone) {
  const io::Folder disk;
  const std::string cache = disk / "cache/rates", target = disk / "target";
  ASSERT_EQ(known_threads(cache, 1), 1);
  const int found = known_threads(cache, 3);
  std::string name;
  for (const auto& entry : std::filesystem::directory_iterator(cache)) {
    name = entry.path().string();
    EXPECT_EQ(entry.status().permissions(), std::filesystem::perms(0600));
  }
  EXPECT_EQ(std::filesystem::status(cache).permissions(), std::filesystem::perms(0700));
  std::ofstream(target) << "the user's";
  std::filesystem::remove(name);
  std::filesystem::create_symlink(target, name);
  known_threads(cache, 3);
  EXPECT_EQ(io::content(target), "the user's") << "written through a link, " << found;
  std::filesystem::create_symlink(cache, disk / "linked");
  std::filesystem::remove(name);
  known_threads(disk / "linked", 3);
  EXPECT_FALSE(std::filesystem::exists(name)) << "kept behind a link";
}

TEST(Rates, NeedNoHome) {
  const char* const home = ::getenv("HOME");
  const char* const cache = ::getenv("XDG_CACHE_HOME");
  const std::string before[] = {home ? home : "", cache ? cache : ""};
  ::unsetenv("HOME");
  ::unsetenv("XDG_CACHE_HOME");
  const std::string folder = rates_folder();
  EXPECT_NE(folder.rfind("/tmp/", 0), 0u) << folder;
  ::setenv("XDG_CACHE_HOME", "relative", 1);
  EXPECT_EQ(rates_folder(), folder);
  ::unsetenv("XDG_CACHE_HOME");
  if (home) ::setenv("HOME", before[0].c_str(), 1);
  if (cache) ::setenv("XDG_CACHE_HOME", before[1].c_str(), 1);
  EXPECT_EQ(known_threads("", 2) >= 1, true) << "measured where nothing is kept";
}

TEST(Rates, ThreadsAreAsFewAsMemoryNeeds) {
  const io::Folder disk;
  EXPECT_EQ(known_threads(disk.path(), 1), 1);
  EXPECT_EQ(disk.entries(), 0u);
  const int found = known_threads(disk.path(), 3);
  EXPECT_GE(found, 1);
  EXPECT_LE(found, 3);
  EXPECT_EQ(known_threads(disk.path(), 3), found);
  for (const auto& entry : std::filesystem::directory_iterator(disk.path())) std::ofstream(entry.path()) << "2 1\n";
  EXPECT_EQ(known_threads(disk.path(), 3), 2);
}

}  // namespace
}  // namespace ds::storage

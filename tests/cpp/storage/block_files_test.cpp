// Planes whose blocks have a file each, and limits of who copies them.
#include <errno.h>
#include <unistd.h>

#include <filesystem>

#include "../error_of.h"
#include "io/file_error.h"
#include "planes.h"

namespace ds::storage {
namespace {

const c10::Device kCpu(at::kCPU);

PlaneExtras with_files(std::vector<std::string> names, ScratchUser copies = {}) {
  PlaneExtras extras;
  extras.block_files = std::move(names);
  extras.copies = copies;
  return extras;
}

class BlockFiles : public testing::TestWithParam<int> {};

// Sizes that are no multiples of anything, by several threads, in small requests.
TEST_P(BlockFiles, HoldTheirElementsAndNothingElse) {
  const io::Folder folder;
  FileAccess access;
  access.threads = GetParam();
  access.transfers.block_bytes = 8192;
  access.transfers.queue_depth = 3;
  {
    ShardStorage storage(kCpu, {}, access);
    const PlaneId plane = storage.add("p", 30033, at::kFloat, at_rest(Medium::kFile, folder.path()), {7, 20007, 30033},
                                      with_files({"a/b/0.swp", "a/b/1.swp", "a/2.swp"}));
    EXPECT_EQ(folder.entries(), 0u);  // a file is made when it is written
    write_plane(storage, plane, {0, 30033}, 0);
    storage.settle();
    EXPECT_EQ(std::filesystem::file_size(folder / "a/b/0.swp"), 7u * 4);
    EXPECT_EQ(std::filesystem::file_size(folder / "a/b/1.swp"), 20000u * 4);
    EXPECT_EQ(std::filesystem::file_size(folder / "a/2.swp"), 10026u * 4);
    EXPECT_TRUE(plane_holds(storage, plane, {0, 30033}, 0));
    fill(storage.acquire(plane, {100, 110}, Access::kUpdate, Medium::kHost).data(), 5);
    EXPECT_TRUE(plane_holds(storage, plane, {110, 20007}, 110));
    const std::string bytes = io::content(folder / "a/b/1.swp");
    float value;
    memcpy(&value, bytes.data() + (103 - 7) * 4, 4);
    EXPECT_EQ(value, 8.0f);
    // Another plane wants the same name.
    const PlaneId other =
        storage.add("q", 3, at::kFloat, at_rest(Medium::kFile, folder.path()), {3}, with_files({"a/2.swp"}));
    write_plane(storage, other, {0, 3}, 1);
    storage.settle();
    EXPECT_EQ(std::filesystem::file_size(folder / "a/2.swp.1"), 12u);
    storage.discard(plane, {20007, 30033});
    EXPECT_FALSE(std::filesystem::exists(folder / "a/2.swp"));
    storage.move(plane, at_rest(Medium::kHost));
    EXPECT_FALSE(std::filesystem::exists(folder / "a/b/0.swp"));
    EXPECT_TRUE(plane_holds(storage, plane, {0, 100}, 0));
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
    EXPECT_TRUE(entry.is_directory()) << entry.path();
}

INSTANTIATE_TEST_SUITE_P(Threads, BlockFiles, testing::Values(1, 3));

TEST(BlockFiles, AFileThatIsGoneOrCutIsNamed) {
  const io::Folder folder;
  ShardStorage storage(kCpu);
  const PlaneId plane = storage.add("p", 6000, at::kFloat, at_rest(Medium::kFile, folder.path()), {3000, 6000},
                                    with_files({"0.swp", "1.swp"}));
  write_plane(storage, plane, {0, 6000}, 0);
  storage.settle();
  const auto error_of = [&](plan::Range range) {
    return thrown<io::FileError>([&] { storage.acquire(plane, range, Access::kRead, Medium::kHost); });
  };
  ASSERT_EQ(::truncate((folder / "1.swp").c_str(), 5000), 0);
  EXPECT_EQ(error_of({3000, 6000}).code(), ENODATA);
  EXPECT_EQ(error_of({3000, 6000}).path(), folder / "1.swp");
  ASSERT_EQ(::unlink((folder / "0.swp").c_str()), 0);
  EXPECT_EQ(error_of({0, 3000}).code(), ENOENT);
  EXPECT_EQ(error_of({0, 3000}).path(), folder / "0.swp");
}

// Copies of a user's planes, prefetched ones too, never take more than they may.
TEST(ScratchLimit, IsACeilingOfCopies) {
  const io::Folder folder;
  ShardStorage storage(kCpu);
  const ScratchUser user = storage.add_scratch_user();
  constexpr int64_t kBlock = 1024, kBlocks = 12, kBytes = 2 * 4096;
  storage.limit_scratch(Medium::kHost, 3 * kBytes, user);
  Cuts cuts;
  std::vector<std::string> names;
  for (int64_t b = 0; b < kBlocks; ++b) {
    cuts.push_back((b + 1) * kBlock);
    names.push_back(std::to_string(b));
  }
  const PlaneId plane = storage.add("p", kBlock * kBlocks, at::kFloat, at_rest(Medium::kFile, folder.path()), cuts,
                                    with_files(names, user));
  for (int round = 0; round < 3; ++round) {
    for (int64_t b = 0; b < kBlocks; ++b)
      write_plane(storage, plane, {b * kBlock, (b + 1) * kBlock}, static_cast<float>(b * kBlock));
    for (int64_t b = 0; b < kBlocks; ++b) {
      for (int64_t ahead = b; ahead < kBlocks; ++ahead)
        storage.prefetch(plane, {ahead * kBlock, (ahead + 1) * kBlock}, Medium::kHost);
      EXPECT_TRUE(plane_holds(storage, plane, {b * kBlock, (b + 1) * kBlock}, b * kBlock));
    }
  }
  storage.settle();
  EXPECT_LE(storage.scratch_usage(Medium::kHost, user).peak, 3 * kBytes);
  EXPECT_EQ(storage.usage()[1].over_budget, 0);
  EXPECT_GT(storage.usage().prefetch_hits, 0);
}

}  // namespace
}  // namespace ds::storage

// Disks that fail: who is told, what is named, what is there afterwards.
#include <errno.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

#include "../error_of.h"
#include "io/file_error.h"
#include "planes.h"

namespace ds::storage {
namespace {

class StorageFaults : public testing::TestWithParam<const char*> {
 protected:
  const io::Folder folder_{GetParam()};
  const std::shared_ptr<io::Files> files_ = std::make_shared<io::Files>();
  ShardStorage storage_{c10::Device(at::kCPU), {}, files_};
  // Blocks of 4096 bytes, the last one of 2000.
  const PlaneId plane_ =
      storage_.add("grads", 2548, at::kFloat, at_rest(Medium::kFile, folder_.path()), {1024, 2048, 2548});

  void write(plan::Range range, float first) { write_plane(storage_, plane_, range, first); }
  bool reads(plan::Range range, float first) { return plane_holds(storage_, plane_, range, first); }
  io::FileError error_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const io::FileError& e) {
      EXPECT_EQ(e.path().find(folder_ / "grads."), 0u) << e.path();
      EXPECT_TRUE(says(e.what(), e.path()));
      EXPECT_TRUE(says(e.what(), "byte " + std::to_string(e.offset())));
      return e;
    }
    ADD_FAILURE() << "no error";
    return {0, "", ""};
  }
};

TEST_P(StorageFaults, AWriteThatFailsIsToldBySettleAndByWhoReads) {
  for (const auto& [action, code] : {std::make_pair("enospc", ENOSPC), {"eio", EIO}}) {
    write({0, 2548}, 0);
    storage_.settle();
    files_->inject(std::string("write:1:") + action);
    write({1024, 2048}, 5000);
    const io::FileError settled = error_of([&] { storage_.settle(); });
    EXPECT_EQ(settled.code(), code);
    EXPECT_EQ(settled.offset(), 4096u);
    EXPECT_EQ(settled.bytes(), 4096u);
    storage_.settle();  // told once
    // The block has no contents; its neighbours do.
    EXPECT_EQ(error_of([&] {
                storage_.acquire(plane_, {1030, 1031}, Access::kUpdate, Medium::kHost);
              }).offset(),
              4096u);
    EXPECT_EQ(error_of([&] { storage_.acquire(plane_, {1030, 1031}, Access::kWrite, Medium::kHost); }).offset(), 4096u);
    EXPECT_EQ(error_of([&] { storage_.move(plane_, at_rest(Medium::kHost)); }).offset(), 4096u);
    EXPECT_TRUE(reads({0, 1024}, 0));
    EXPECT_TRUE(reads({2048, 2548}, 2048));
    write({1024, 2048}, 1024);
    storage_.settle();
    EXPECT_TRUE(reads({0, 2548}, 0));
  }
}

TEST_P(StorageFaults, SettleTellsOfAll) {
  files_->inject("write:1+:eio");
  write({0, 2548}, 0);
  const io::FileError error = error_of([&] { storage_.settle(); });
  EXPECT_EQ(error.offset(), 0u);
  EXPECT_TRUE(says(error.what(), "2 more blocks could not be written back"));
  EXPECT_TRUE(says(error.what(), "(4096 bytes at byte 8192)"));
}

TEST_P(StorageFaults, AReadThatFailsIsToldByAcquire) {
  write({0, 2548}, 0);
  storage_.settle();
  files_->inject("read:2:eio");
  const io::FileError error = error_of([&] { reads({0, 2548}, 0); });
  EXPECT_EQ(error.code(), EIO);
  EXPECT_EQ(error.offset(), 4096u);
  EXPECT_TRUE(reads({0, 2548}, 0));  // once more, and it works
  // A prefetch fails in silence; the lease reads again.
  files_->inject("read:1:eio");
  storage_.prefetch(plane_, {0, 1024}, Medium::kHost);
  storage_.settle();
  EXPECT_TRUE(reads({0, 1024}, 0));
  EXPECT_EQ(storage_.usage().prefetch_drops, 1);
  files_->inject("read:1+:eio");
  EXPECT_EQ(error_of([&] { storage_.move(plane_, at_rest(Medium::kHost)); }).code(), EIO);
  files_->inject("read:1:short,read:2:eintr,write:1:short,write:2:eintr");
  EXPECT_TRUE(reads({0, 2548}, 0));
  write({0, 2548}, 1);
  storage_.settle();
  EXPECT_TRUE(reads({0, 2548}, 1));
}

TEST_P(StorageFaults, AFileThatWasCutIsNamed) {
  write({0, 2548}, 0);
  storage_.settle();
  const std::string path = std::filesystem::directory_iterator(folder_.path())->path();
  ASSERT_EQ(::truncate(path.c_str(), 8192 + 1000), 0);
  EXPECT_TRUE(reads({0, 2048}, 0));
  const io::FileError error = error_of([&] { reads({2048, 2548}, 2048); });
  EXPECT_EQ(error.code(), ENODATA);
  EXPECT_EQ(error.path(), path);
  EXPECT_EQ(error.offset(), 8192u);
  EXPECT_EQ(error.bytes(), 2000u);
  EXPECT_TRUE(says(error.what(), "the file ends at byte 9192"));
}

TEST_P(StorageFaults, AMoveThatFailsLeavesEverythingWhereItIs) {
  ShardStorage storage(c10::Device(at::kCPU), {}, files_);
  const PlaneId a = storage.add("a", 3000, at::kFloat, {}),
                b = storage.add("b", 3000, at::kFloat, at_rest(Medium::kHost));
  const at::Tensor lasting = storage.resident(a);
  fill(lasting, 4);
  fill(storage.resident(b), 8);
  const size_t before = folder_.entries();
  files_->inject("write:2:enospc");
  EXPECT_THROW(storage.move({a, b}, at_rest(Medium::kFile, folder_.path())), io::FileError);
  EXPECT_EQ(folder_.entries(), before);
  EXPECT_TRUE(holds(lasting, 4));
  EXPECT_TRUE(holds(storage.resident(b), 8));
  EXPECT_EQ(storage.usage()[2].resting, 0);
  storage.move({a, b}, at_rest(Medium::kFile, folder_.path()));
  files_->inject("read:2:eio");
  EXPECT_THROW(storage.move({a, b}, at_rest(Medium::kDevice)), io::FileError);
  EXPECT_EQ(lasting.storage().nbytes(), 0u);
  EXPECT_EQ(storage.usage()[0].resting, 0);
  storage.move({a, b}, at_rest(Medium::kDevice));
  EXPECT_TRUE(holds(lasting, 4));
  files_->inject("open:1:emfile");
  EXPECT_THROW(storage.add("c", 3000, at::kFloat, at_rest(Medium::kFile, folder_.path())), io::FileError);
  EXPECT_EQ(folder_.entries(), before);
}

INSTANTIATE_TEST_SUITE_P(OnAndOffDisk, StorageFaults, testing::Values("/tmp", "/dev/shm"), [](const auto& info) {
  return std::string(info.param == std::string("/tmp") ? "Disk" : "Tmpfs");
});

TEST(FileTier, LargeBlocksGoInPieces) {
  const io::Folder folder("/tmp");
  const auto files = std::make_shared<io::Files>();
  ShardStorage storage(c10::Device(at::kCPU), {}, files);
  const int64_t numel = (9 << 20) / 4 + 77;
  const PlaneId plane = storage.add("x", numel, at::kFloat, at_rest(Medium::kFile, folder.path()));
  write_plane(storage, plane, {0, numel}, 0);
  files->inject("read:1:short,read:3:short");
  EXPECT_TRUE(plane_holds(storage, plane, {0, numel}, 0));
  files->inject("read:2:eio");
  const auto read = [&] { storage.acquire(plane, {0, numel}, Access::kRead, Medium::kHost); };
  EXPECT_EQ(thrown<io::FileError>(read).code(), EIO);
}

}  // namespace
}  // namespace ds::storage

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "planes.h"
#include "storage/block_files.h"

namespace ds::storage {
namespace {

// The one that has used the folders before removes them when they are empty, again and again.
TEST(FileList, MakesFilesInFoldersThatOthersRemove) {
  const io::Folder folder;
  std::atomic<bool> ended{false};
  std::thread other([&] {
    while (!ended) {
      ::rmdir((folder / "a/b").c_str());
      ::rmdir((folder / "a").c_str());
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    }
  });
  for (int i = 0; i < 2000; ++i) {
    FileList files(folder.path(), {"a/b/0.swp"}, nullptr);
    EXPECT_NO_THROW(files.made(0));
    files.discard(0);
  }
  ended = true;
  other.join();
}

}  // namespace
}  // namespace ds::storage

// Files on a local disk: one for each part, as long as its blocks, or one for each block; removed with the part.
#include <string.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "io/memory/aligned_pool.h"
#include "io/async/async_file.h"
#include "io/folders/swap_files.h"
#include "storage/block_files.h"
#include "storage/tier.h"

namespace ds::storage {
namespace {

class FilePart : public Part {
 public:
  FilePart(const FileAccess& access, const PartSpec& spec)
      : files_(access.files),
        request_bytes_(io::round_up(access.transfers.block_bytes, io::kBlockBytes)),
        depth_(access.transfers.queue_depth) {
    if (spec.placement.folder.empty()) {
      fail(ErrorKind::kValue, "plane '", spec.plane, "' is to rest in a file: its placement needs a folder");
    }
    own_ = std::make_shared<io::SwapFile>(spec.placement.folder, spec.plane);
    path_ = own_->path();
    file_ = files_->open_part(path_, &direct_, /*read=*/true);
    uint64_t end = 0;
    for (const int64_t bytes : spec.block_bytes) {
      blocks_.push_back({end, static_cast<size_t>(bytes)});
      end += io::round_up(static_cast<size_t>(bytes), io::kBlockBytes);
    }
    files_->reserve(file_, path_, end);
    files_->truncate(file_, path_, end);  // a file system without fallocate: what was never written reads as zeros
  }

  std::weak_ptr<io::SwapFile> file() const { return own_; }

  void read(size_t block, char* data) override { transfer(block, data, /*reads=*/true); }

  void write(size_t block, char* data) override {
    const size_t bytes = blocks_[block].bytes;
    memset(data + bytes, 0, io::round_up(bytes, io::kBlockBytes) - bytes);
    transfer(block, data, /*reads=*/false);
  }

 private:
  struct Block {
    uint64_t offset;
    size_t bytes;
  };

  void transfer(size_t block, char* data, bool reads) {
    const Block found = blocks_[block];
    const size_t whole = io::round_up(found.bytes, io::kBlockBytes);
    const auto async =
        direct_ && whole > request_bytes_ ? io::open_async(*files_, file_, path_, direct_, depth_) : nullptr;
    if (!async) {
      if (reads) return files_->read_all(file_, path_, data, whole, found.offset, found.bytes);
      return files_->write_all(file_, path_, data, whole, found.offset);
    }
    int busy = 0;
    for (size_t at = 0; at < whole; at += request_bytes_) {
      if (busy == depth_) {
        async->wait();
        --busy;
      }
      const size_t now = std::min(request_bytes_, whole - at);
      if (reads) {
        async->submit_read(data + at, now, found.offset + at, std::min(now, found.bytes - at));
      } else {
        async->submit_write(data + at, now, found.offset + at);
      }
      ++busy;
    }
    while (async->wait() != nullptr) {
    }
  }

  const std::shared_ptr<io::Files> files_;
  const size_t request_bytes_;
  const int depth_;
  std::shared_ptr<io::SwapFile> own_;
  std::string path_;
  bool direct_ = true;
  io::Descriptor file_;
  std::vector<Block> blocks_;
};

class FileTier : public Tier {
 public:
  explicit FileTier(FileAccess access)
      : access_(std::move(access)), queue_(std::make_shared<io::TransferQueue>(access_.threads)) {
    io::check(access_.transfers);
  }
  std::unique_ptr<Part> open(const PartSpec& spec) override {
    const std::lock_guard guard(lock_);
    const auto ended = [](const auto& file) { return file.expired(); };
    erase_if(opened_, ended);
    erase_if(lists_, ended);
    if (!spec.block_files.empty()) {
      auto part = std::make_unique<BlockFiles>(access_, queue_, spec);
      lists_.push_back(part->list());
      return part;
    }
    auto part = std::make_unique<FilePart>(access_, spec);
    opened_.push_back(part->file());
    if (spec.folder) folders_.insert(spec.folder);
    return part;
  }
  void at_exit() noexcept override {
    const std::lock_guard guard(lock_);
    for (const auto& one : opened_)
      if (const auto file = one.lock()) file->remove();
    for (const auto& one : lists_)
      if (const auto list = one.lock()) list->remove();
    for (const auto& one : folders_)
      if (const auto folder = one.lock()) folder->close();
  }

 private:
  const FileAccess access_;
  const std::shared_ptr<io::TransferQueue> queue_;  // its threads start with the first transfer that they share
  std::mutex lock_;
  std::vector<std::weak_ptr<io::SwapFile>> opened_;
  std::vector<std::weak_ptr<FileList>> lists_;
  std::set<std::weak_ptr<io::RunFolder>, std::owner_less<>> folders_;
};

std::unique_ptr<Tier> make_file_tier(const TierContext& context) { return std::make_unique<FileTier>(context.files); }
const TierRegistration file_registration("file", &make_file_tier);

}  // namespace
}  // namespace ds::storage

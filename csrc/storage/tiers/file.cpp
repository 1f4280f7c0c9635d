// Files on a local disk: one for each part, as long as its blocks, removed with the part.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/process.h"
#include "io/aligned_pool.h"
#include "io/async_file.h"
#include "io/file_error.h"
#include "storage/tier.h"

namespace ds::storage {
namespace {

constexpr size_t kTransferBytes = 4 << 20;  // one request of the kernel
constexpr int kTransferDepth = 8;

class FilePart : public Part {
 public:
  FilePart(std::shared_ptr<io::Files> files, const PartSpec& spec) : files_(std::move(files)) {
    path_ = unused_path(spec);
    try {
      file_ = files_->open_part(path_, &direct_, /*read=*/true);
      uint64_t end = 0;
      for (const int64_t bytes : spec.block_bytes) {
        blocks_.push_back({end, static_cast<size_t>(bytes)});
        end += io::round_up(static_cast<size_t>(bytes), io::kBlockBytes);
      }
      files_->reserve(file_, path_, end);
    } catch (...) {
      ::unlink(path_.c_str());
      throw;
    }
  }
  ~FilePart() override {
    if (owner_.here()) ::unlink(path_.c_str());
  }

  void read(size_t block, char* data) override { transfer(block, data, /*reads=*/true); }

  void write(size_t block, char* data) override {
    const size_t bytes = blocks_[block].bytes;
    memset(data + bytes, 0, io::round_up(bytes, io::kBlockBytes) - bytes);
    transfer(block, data, /*reads=*/false);
  }

 private:
  struct Place {
    uint64_t offset;
    size_t bytes;
  };

  static std::string unused_path(const PartSpec& spec) {
    std::string name = spec.plane;
    for (char& c : name) {
      if (c == '/' || c == '\0') c = '_';
    }
    if (spec.placement.folder.empty()) {
      fail(ErrorKind::kValue, "plane '", spec.plane, "' is to rest in a file: its placement needs a folder");
    }
    std::string path = spec.placement.folder + "/" + name.substr(0, 100) + ".XXXXXX";
    const io::Descriptor made(::mkstemp(path.data()));
    if (!made.is_open()) io::fail_file(errno, "creating a file", path);
    return path;
  }

  void transfer(size_t block, char* data, bool reads) {
    const Place place = blocks_[block];
    const size_t whole = io::round_up(place.bytes, io::kBlockBytes);
    const auto async =
        direct_ && whole > kTransferBytes ? io::open_async(*files_, file_, path_, direct_, kTransferDepth) : nullptr;
    if (!async) {
      if (reads) return files_->read_all(file_, path_, data, whole, place.offset, place.bytes);
      return files_->write_all(file_, path_, data, whole, place.offset);
    }
    int busy = 0;
    for (size_t at = 0; at < whole; at += kTransferBytes) {
      if (busy == kTransferDepth) {
        async->wait();
        --busy;
      }
      const size_t now = std::min(kTransferBytes, whole - at);
      if (reads) {
        async->submit_read(data + at, now, place.offset + at, std::min(now, place.bytes - at));
      } else {
        async->submit_write(data + at, now, place.offset + at);
      }
      ++busy;
    }
    while (async->wait() != nullptr) {
    }
  }

  const std::shared_ptr<io::Files> files_;
  const OwningProcess owner_;
  std::string path_;
  bool direct_ = true;
  io::Descriptor file_;
  std::vector<Place> blocks_;
};

class FileTier : public Tier {
 public:
  explicit FileTier(std::shared_ptr<io::Files> files) : files_(std::move(files)) {}
  std::unique_ptr<Part> open(const PartSpec& spec) override { return std::make_unique<FilePart>(files_, spec); }

 private:
  const std::shared_ptr<io::Files> files_;
};

std::unique_ptr<Tier> make_file_tier(const TierContext& context) { return std::make_unique<FileTier>(context.files); }
const TierRegistration file_registration("file", &make_file_tier);

}  // namespace
}  // namespace ds::storage

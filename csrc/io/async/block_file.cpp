#include "io/async/block_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "io/memory/aligned_pool.h"
#include "io/file_error.h"

namespace ds::io {
namespace {

// The beginning of the kernel's struct statx, whose last two fields this libc does not know yet.
struct StatxFacts {
  uint32_t mask;
  char others[148];
  uint32_t direct_address_multiple, direct_offset_multiple;
  char more[96];
};
static_assert(sizeof(StatxFacts) == 256);
constexpr unsigned kStatxDirect = 0x2000;  // STATX_DIOALIGN

// The alignment that O_DIRECT needs. Kernels from 6.1 on report it; for others it is a whole block. `usable`: whether
// offsets in multiples of kBlockBytes will do.
size_t address_multiple_of(int number, bool* usable) {
  StatxFacts facts = {};
  *usable = true;
  if (::syscall(SYS_statx, number, "", AT_EMPTY_PATH, kStatxDirect, &facts) != 0 || (facts.mask & kStatxDirect) == 0)
    return kBlockBytes;
  const uint32_t address = facts.direct_address_multiple;
  const uint32_t offset = facts.direct_offset_multiple;
  *usable = address != 0 && address <= kBlockBytes && offset != 0 && kBlockBytes % offset == 0;
  return address;
}

std::string path_of(int number) {
  char path[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(number);
  const ssize_t length = ::readlink(link.c_str(), path, sizeof(path));
  return length > 0 ? std::string(path, static_cast<size_t>(length)) : "file descriptor " + std::to_string(number);
}

}  // namespace

BlockFile::BlockFile(Files& files, const std::string& path, Mode mode, bool direct)
    : files_(files),
      path_(path),
      has_direct_(direct),
      file_(mode == Mode::kRead ? files.open_read(path, &has_direct_)
                                : files.open_part(path, &has_direct_, /*read=*/true)) {
  struct stat facts;
  if (::fstat(file_.get(), &facts) == 0 && S_ISDIR(facts.st_mode)) fail_file(EISDIR, "open", path);
  if (has_direct_) open_tail(path, mode);
}

BlockFile::BlockFile(Files& files, int number, Mode mode)
    : files_(files), path_(path_of(number)), borrowed_(true), borrowed_file_(number) {
  const int flags = ::fcntl(number, F_GETFL);
  if (flags < 0) {
    borrowed_file_.release();
    fail_file(errno, mode == Mode::kRead ? "read" : "write", "file descriptor " + std::to_string(number));
  }
  has_direct_ = (flags & O_DIRECT) != 0;
  try {
    if (has_direct_) open_tail("/proc/self/fd/" + std::to_string(number), mode);
  } catch (...) {
    borrowed_file_.release();
    throw;
  }
}

BlockFile::~BlockFile() { borrowed_file_.release(); }

void BlockFile::open_tail(const std::string& path, Mode mode) {
  bool usable = true;
  address_multiple_ = address_multiple_of(direct().get(), &usable);
  bool without = false;
  tail_ = mode == Mode::kRead ? files_.open_read(path, &without) : files_.open_part(path, &without, /*read=*/true);
  if (usable || borrowed_) return;
  file_ = std::move(tail_);
  has_direct_ = false;
  address_multiple_ = 1;
}

uint64_t BlockFile::bytes() const {
  struct stat facts;
  if (::fstat(direct().get(), &facts) != 0) fail_file(errno, "stat", path_);
  return static_cast<uint64_t>(facts.st_size);
}

void BlockFile::reserve(uint64_t end, uint64_t offset, uint64_t bytes) {
  const uint64_t now = this->bytes();
  if (end <= now) return;
  // Asked for more than there is, ext4 takes all there is before it says so.
  struct statvfs disk;
  if (::fstatvfs(direct().get(), &disk) == 0 && disk.f_blocks != 0 &&
      static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize < end - now) {
    fail_transfer(ENOSPC, "write", path_, offset, bytes);
  }
  int result;
  do {
    result = ::fallocate(direct().get(), 0, static_cast<off_t>(now), static_cast<off_t>(end - now));
  } while (result != 0 && errno == EINTR);
  if (result == 0 || errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL || errno == ENODEV || errno == ESPIPE)
    return;  // such a file grows as it is written
  fail_transfer(errno, "write", path_, offset, bytes);
}

}  // namespace ds::io

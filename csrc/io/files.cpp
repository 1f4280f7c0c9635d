#include "io/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>

#include "io/async/aio_contexts.h"
#include "io/memory/aligned_pool.h"
#include "io/faults.h"
#include "io/file_error.h"
#include "io/folders/paths.h"
#include "io/async/uring_rings.h"

namespace ds::io {
namespace {

constexpr size_t kLargestRead = size_t{1} << 30;  // one read of Linux ends below 2 GiB

// Carries out a verdict other than a short write: dies, or returns the errno to fail with (0: go on).
int carry_out(const Faults::CheckResult& verdict) {
  if (verdict.action == Faults::Action::kKill) Faults::die();
  return verdict.action == Faults::Action::kError ? verdict.code : 0;
}

int open_retrying(const std::string& path, int flags, mode_t mode = 0) {
  int number;
  do {
    number = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (number < 0 && errno == EINTR);
  return number;
}

// Answers of a file system that does not have the operation at all.
bool is_lacking(int code) { return code == ENOSYS || code == EOPNOTSUPP || code == EINVAL || code == EPERM; }

bool is_folder(const std::string& path) {
  struct stat found;
  return ::lstat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
}

bool is_direct(const Descriptor& file) { return (fcntl(file.get(), F_GETFL) & O_DIRECT) != 0; }
void without_direct(const Descriptor& file) { fcntl(file.get(), F_SETFL, fcntl(file.get(), F_GETFL) & ~O_DIRECT); }

}  // namespace

Files::Files(const std::string& fault_order)
    : faults_(std::make_unique<Faults>(fault_order)),
      aio_contexts_(std::make_unique<AioContexts>()),
      uring_rings_(std::make_unique<UringRings>()) {}
Files::~Files() = default;

void Files::inject(const std::string& fault_order) { faults_->arm(fault_order); }

Descriptor Files::create(const std::string& path, bool* direct, bool* resizable) {
  if (const int code = carry_out(faults_->count(Call::kOpen))) fail_file(code, "open for writing", path);
  const int flags = O_WRONLY | O_CREAT | O_TRUNC;
  int number = -1;
  if (*direct) {
    number = open_direct(path, flags);
    *direct = number >= 0;
    if (number < 0 && !is_lacking(errno)) fail_file(errno, "open for writing", path);
  }
  if (number < 0) number = open_retrying(path, flags, 0666);
  if (number < 0 && is_lacking(errno)) {  // it cannot empty the file that is there
    const int code = errno;
    if (::unlink(path.c_str()) != 0) fail_file(code, "open for writing", path);
    number = open_retrying(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
  }
  if (number < 0) fail_file(errno, "open for writing", path);
  Descriptor made(number);
  const int code = resize(made, 0);
  *resizable = code == 0;
  if (code == 0) return made;
  if (!is_lacking(code)) {
    ::unlink(path.c_str());
    fail_file(code, "setting the size", path);
  }
  if (*direct) without_direct(made);
  *direct = false;
  return made;
}

Descriptor Files::open_part(const std::string& path, bool* direct, bool read) {
  if (const int code = carry_out(faults_->count(Call::kOpen))) fail_file(code, "open for writing", path);
  const int flags = (read ? O_RDWR : O_WRONLY) | O_CREAT;
  int number = *direct ? open_direct(path, flags) : -1;
  *direct = number >= 0;
  if (number < 0) number = open_retrying(path, flags, 0666);
  if (number < 0) fail_file(errno, "open for writing", path);
  return Descriptor(number);
}

Descriptor Files::open_read(const std::string& path, bool* direct) {
  int number = *direct ? open_direct(path, O_RDONLY) : -1;
  *direct = number >= 0;
  if (number < 0) number = open_retrying(path, O_RDONLY);
  if (number < 0) fail_file(errno, "open for reading", path);
  return Descriptor(number);
}

// With O_DIRECT; a fault on order is a file system that has none.
int Files::open_direct(const std::string& path, int flags) {
  if (const int code = carry_out(faults_->count(Call::kDirect))) {
    errno = code;
    return -1;
  }
  return open_retrying(path, flags | O_DIRECT, 0666);
}

int Files::resize(const Descriptor& file, uint64_t bytes) {
  if (const int code = carry_out(faults_->count(Call::kTruncate))) return code;
  int result;
  do {
    result = ::ftruncate(file.get(), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

void Files::reserve(const Descriptor& file, const std::string& path, uint64_t bytes) {
  if (bytes == 0) return;
  int result;
  do {
    result = ::fallocate(file.get(), 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) fail_file(errno, "reserving space", path, bytes);
  struct statvfs disk;
  if (statvfs(parent_folder(path).c_str(), &disk) == 0 && disk.f_blocks != 0 &&
      static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize < bytes) {
    fail_file(ENOSPC, "reserving space", path, bytes);
  }
}

ssize_t Files::write_some(const Descriptor& file, const void* data, size_t bytes, uint64_t offset) {
  const Faults::CheckResult verdict = faults_->count(Call::kWrite);
  if (verdict.action == Faults::Action::kError) {
    errno = verdict.code;
    return -1;
  }
  const bool torn = verdict.action != Faults::Action::kNone;
  size_t now = bytes;
  if (torn) {
    now = bytes / 2;
    if (is_direct(file)) now = now / kBlockBytes * kBlockBytes;
  }
  const ssize_t written = now == 0 ? 0 : ::pwrite(file.get(), data, now, static_cast<off_t>(offset));
  if (verdict.action == Faults::Action::kKill) Faults::die();
  return written;
}

void Files::write_all(const Descriptor& file, const std::string& path, const void* data, size_t bytes,
                      uint64_t offset) {
  const char* at = static_cast<const char*>(data);
  int empty = 0;
  while (bytes > 0) {
    const ssize_t written = write_some(file, at, bytes, offset);
    if (written < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL && is_direct(file)) {  // it took the flag, but not this alignment
        without_direct(file);
        continue;
      }
      fail_transfer(errno, "write", path, offset, bytes);
    }
    if (written == 0 && ++empty > 8) fail_transfer(EIO, "write", path, offset, bytes);
    at += written;
    offset += static_cast<uint64_t>(written);
    bytes -= static_cast<size_t>(written);
  }
}

ssize_t Files::read_some(const Descriptor& file, void* data, size_t bytes, uint64_t offset) {
  const Faults::CheckResult verdict = faults_->count(Call::kRead);
  if (const int code = carry_out(verdict)) {
    errno = code;
    return -1;
  }
  if (verdict.action == Faults::Action::kShort) bytes = Faults::short_read(bytes);
  return ::pread(file.get(), data, std::min(bytes, kLargestRead), static_cast<off_t>(offset));
}

void Files::read_all(const Descriptor& file, const std::string& path, void* data, size_t bytes, uint64_t offset,
                     size_t least, size_t done) {
  while (done < least) {
    // With O_DIRECT again from the start of a block, whatever of it is there.
    const size_t from = is_direct(file) ? done / kBlockBytes * kBlockBytes : done;
    const ssize_t got = read_some(file, static_cast<char*>(data) + from, bytes - from, offset + from);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL && is_direct(file)) {
        without_direct(file);
        continue;
      }
      fail_transfer(errno, "read", path, offset, bytes);
    }
    if (from + static_cast<size_t>(got) <= done) {
      struct stat now;
      const uint64_t end = offset + done;
      const bool known = ::fstat(file.get(), &now) == 0;
      fail_truncated(path, known ? std::min(end, static_cast<uint64_t>(now.st_size)) : end, offset, least);
    }
    done = from + static_cast<size_t>(got);
  }
}

void Files::sync(const Descriptor& file, const std::string& path) {
  if (const int code = carry_out(faults_->count(Call::kSync))) fail_file(code, "fsync", path);
  // Never repeated after a failure: the kernel has dropped the pages, and a second fsync would say all is well.
  if (::fsync(file.get()) != 0) fail_file(errno, "fsync", path);
}

void Files::truncate(const Descriptor& file, const std::string& path, uint64_t bytes) {
  if (const int code = resize(file, bytes)) fail_file(code, "setting the size", path, bytes);
}

void Files::sync_directory(const std::string& path) {
  const Descriptor folder(open_retrying(path, O_RDONLY | O_DIRECTORY));
  if (!folder.is_open()) fail_file(errno, "open", path);
  if (const int code = carry_out(faults_->count(Call::kSync))) fail_file(code, "fsync", path);
  // Some network file systems have no fsync of folders; their servers order the operations themselves.
  if (::fsync(folder.get()) != 0 && errno != EINVAL && errno != EROFS) fail_file(errno, "fsync", path);
}

void Files::rename(const std::string& from, const std::string& to) {
  const std::string both = from + " to " + to;
  if (const int code = carry_out(faults_->count(Call::kRename))) fail_file(code, "rename", both);
  if (is_folder(from)) {
    if (const int code = carry_out(faults_->count(Call::kRenameFolder))) fail_file(code, "rename", both);
  }
  if (::rename(from.c_str(), to.c_str()) != 0) fail_file(errno, "rename", both);
}

bool Files::exchange(const std::string& a, const std::string& b) {
  const std::string both = a + " and " + b;
  // A file system without the operation answers so before it has done anything: no moment of its own to fail at.
  int code = carry_out(faults_->count(Call::kExchange));
  if (code == 0) {
    if ((code = carry_out(faults_->count(Call::kRename)))) fail_file(code, "exchange", both);
    if (is_folder(a) && (code = carry_out(faults_->count(Call::kRenameFolder)))) fail_file(code, "exchange", both);
    if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
    code = errno;
  }
  if (code != EINVAL && code != ENOSYS && code != EOPNOTSUPP) fail_file(code, "exchange", both);
  return false;
}

}  // namespace ds::io

#include "formats/checked_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "base/thread_pool.h"
#include "io/file_error.h"

namespace ds::formats {
namespace {

constexpr uint64_t kHugePage = 2 << 20;
constexpr uint64_t kPiece = 8 << 20;  // bytes that one thread takes at a time: whole huge pages

// Most of the time of a read into fresh memory goes into its pages, one fault for each: 512 times fewer are left.
void ask_for_huge_pages(const io::Range& range) {
  const auto begin = reinterpret_cast<uintptr_t>(range.to), end = begin + range.bytes;
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = end / kHugePage * kHugePage;
  // A hint only.
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // NOLINT
}

}  // namespace

CheckedFile::CheckedFile(const std::string& path) : path_(path) {
  int number;
  do {
    number = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  } while (number < 0 && errno == EINTR);
  if (number < 0) io::fail_file(errno, "open", path);
  file_ = io::Descriptor(number);
  struct stat facts;
  if (::fstat(number, &facts) != 0) io::fail_file(errno, "stat", path);
  if (S_ISDIR(facts.st_mode)) io::fail_file(EISDIR, "open", path);
  identity_.device = facts.st_dev;
  identity_.inode = facts.st_ino;
  identity_.bytes = static_cast<uint64_t>(facts.st_size);
  identity_.changed_ns = facts.st_mtim.tv_sec * int64_t{1000000000} + facts.st_mtim.tv_nsec;
}

void CheckedFile::read(void* to, uint64_t bytes, uint64_t offset) const {
  char* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = ::pread(file_.get(), at, std::min<uint64_t>(bytes, 1 << 30), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) io::fail_file(errno, "read", path_);
    if (got == 0) io::fail_file(EIO, "read", path_);
    at += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
}

std::string CheckedFile::text(uint64_t offset, uint64_t bytes) const {
  std::string found(bytes, '\0');
  read(found.data(), bytes, offset);
  return found;
}

void read_ranges(const std::string& path, const FileIdentity& identity, const std::vector<io::Range>& ranges,
                 int threads) {
  const CheckedFile file(path);
  if (!(file.identity() == identity)) {
    throw io::FileError(ESTALE, path, path + " has changed since it was opened; load the checkpoint again");
  }
  std::vector<io::Range> pieces;
  for (const io::Range& range : ranges) {
    ask_for_huge_pages(range);
    for (uint64_t at = 0; at < range.bytes;) {
      const auto address = reinterpret_cast<uintptr_t>(range.to) + at;
      const uint64_t now = std::min(range.bytes - at, kPiece - address % kHugePage);
      pieces.push_back({range.offset + at, now, static_cast<char*>(range.to) + at});
      at += now;
    }
  }
  ThreadPool pool(std::clamp(threads, 1, static_cast<int>(std::clamp<size_t>(pieces.size(), 1, 256))));
  pool.parallel_for(pieces.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) file.read(pieces[i].to, pieces[i].bytes, pieces[i].offset);
  });
}

}  // namespace ds::formats

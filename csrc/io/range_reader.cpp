#include "io/range_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "base/thread_pool.h"
#include "io/crc32.h"
#include "io/descriptor.h"
#include "io/file_error.h"

namespace ds::io {
namespace {

constexpr uint64_t kPiece = 16 << 20;  // bytes that one thread takes at a time
constexpr uint64_t kScratch = 1 << 20;

// A part of one range, small enough that threads share large ranges.
struct Piece {
  size_t range;
  uint64_t from;  // inside the range
  uint64_t bytes;
};

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {
    int number;
    do {
      number = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    } while (number < 0 && errno == EINTR);
    if (number < 0) fail_file(errno, "open", path);
    file_ = Descriptor(number);
    struct stat facts;
    if (::fstat(number, &facts) != 0) fail_file(errno, "stat", path);
    if (S_ISDIR(facts.st_mode)) fail_file(EISDIR, "open", path);
    bytes_ = static_cast<uint64_t>(facts.st_size);
  }

  uint64_t bytes() const { return bytes_; }

  void read(char* to, uint64_t bytes, uint64_t offset) const {
    while (bytes > 0) {
      const ssize_t got = ::pread(file_.get(), to, std::min<uint64_t>(bytes, 1 << 30), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail_file(errno, "read", path_);
      if (got == 0) fail(ErrorKind::kRuntime, path_, " became shorter while it was read: ends at byte ", offset);
      to += got;
      offset += static_cast<uint64_t>(got);
      bytes -= static_cast<uint64_t>(got);
    }
  }

 private:
  std::string path_;
  Descriptor file_;
  uint64_t bytes_ = 0;
};

std::vector<Range> inside(const Reader& reader, const std::string& path, std::vector<Range> ranges) {
  for (Range& range : ranges) {
    if (range.bytes == kToTheEnd && range.offset <= reader.bytes()) range.bytes = reader.bytes() - range.offset;
    if (range.offset > reader.bytes() || range.bytes > reader.bytes() - range.offset) {
      fail(ErrorKind::kRuntime, path, " is too short: it has ", reader.bytes(), " bytes, and ", range.bytes,
           " are asked for from byte ", range.offset, ". The file is damaged or incomplete: take an older checkpoint.");
    }
  }
  return ranges;
}

std::vector<Piece> pieces_of(const std::vector<Range>& ranges) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (uint64_t from = 0; from < ranges[i].bytes; from += kPiece) {
      pieces.push_back({i, from, std::min(kPiece, ranges[i].bytes - from)});
    }
  }
  return pieces;
}

}  // namespace

std::vector<uint32_t> sum_ranges(const std::string& path, const std::vector<Range>& ranges, int threads) {
  const Reader reader(path);
  const std::vector<Range> wanted = inside(reader, path, ranges);
  const std::vector<Piece> pieces = pieces_of(wanted);
  std::vector<uint32_t> sums(pieces.size());
  ThreadPool pool(std::clamp(threads, 1, static_cast<int>(std::clamp<size_t>(pieces.size(), 1, 256))));
  pool.parallel_for(pieces.size(), 1, [&](size_t begin, size_t end) {
    std::vector<char> scratch(kScratch);
    for (size_t i = begin; i < end; ++i) {
      const uint64_t offset = wanted[pieces[i].range].offset + pieces[i].from;
      for (uint64_t done = 0; done < pieces[i].bytes; done += kScratch) {
        const uint64_t now = std::min(kScratch, pieces[i].bytes - done);
        reader.read(scratch.data(), now, offset + done);
        sums[i] = crc32_of(scratch.data(), now, sums[i]);
      }
    }
  });
  std::vector<uint32_t> joined(ranges.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    uint32_t& sum = joined[pieces[i].range];
    sum = crc32_joined(sum, sums[i], pieces[i].bytes);
  }
  return joined;
}

}  // namespace ds::io

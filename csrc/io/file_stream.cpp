#include "io/file_stream.h"

#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "io/crc32.h"
#include "io/file_error.h"

namespace ds::io {
namespace {

constexpr size_t kLargestBuffer = size_t{1} << 30;  // one write of Linux ends below 2 GiB
constexpr size_t kDirectFrom = 1 << 20;             // below, the page cache and its fsync are no slower
constexpr size_t kSmallest = 4 << 20;               // a smaller write costs the disk as much
constexpr size_t kChecksumShare = 1 << 20;          // bytes below which another thread costs more than it helps

const StreamOptions& checked(const StreamOptions& options) {
  if (options.buffer_bytes < 1 || options.buffer_bytes > kLargestBuffer) {
    fail(ErrorKind::kValue, "io_buffer_size must be from 1 to ", kLargestBuffer, " bytes, got ", options.buffer_bytes);
  }
  if (options.buffers < 1 || options.buffers > 64) {
    fail(ErrorKind::kValue, "the number of write buffers must be from 1 to 64, got ", options.buffers);
  }
  if (options.threads < 1 || options.threads > 256) {
    fail(ErrorKind::kValue, "the number of threads of a writer must be from 1 to 256, got ", options.threads);
  }
  if (options.mapped && (options.direct || options.part)) {
    fail(ErrorKind::kValue, "a mapped file is written neither past the page cache nor in parts");
  }
  return options;
}

// So small that filling and writing overlap also in a file of a few buffers.
size_t needed_buffer(uint64_t expected_bytes, size_t buffer_bytes) {
  if (expected_bytes == 0) return buffer_bytes;
  const uint64_t eighth = round_up(expected_bytes / 8, kBlockBytes);
  return static_cast<size_t>(std::min<uint64_t>({expected_bytes, std::max<uint64_t>(eighth, kSmallest), buffer_bytes}));
}

size_t needed_buffers(uint64_t expected_bytes, const StreamOptions& options) {
  return expected_bytes != 0 && expected_bytes <= needed_buffer(expected_bytes, options.buffer_bytes)
             ? 1
             : static_cast<size_t>(options.buffers);
}

Descriptor opened(Files& files, const std::string& path, const StreamOptions& options, bool* direct, bool* resizable) {
  if (options.part) return files.open_part(path, direct);
  if (options.mapped) return files.open_part(path, direct, /*read=*/true);
  return files.create(path, direct, resizable);
}

}  // namespace

FileStream::FileStream(Files& files, const std::string& path, uint64_t expected_bytes, const StreamOptions& options)
    : files_(files),
      path_(path),
      options_(checked(options)),
      direct_(options.direct && (expected_bytes == 0 || expected_bytes >= kDirectFrom)),
      pool_(options.mapped ? 1 : needed_buffers(expected_bytes, options),
            options.mapped ? 1 : needed_buffer(expected_bytes, options.buffer_bytes)),
      workers_(expected_bytes != 0 && expected_bytes < 2 * kChecksumShare ? 1 : options.threads),
      file_(opened(files, path, options, &direct_, &resizable_)),
      written_(options.begin) {
  try {
    if (options_.mapped) {
      method_ = "mapped";
      if (expected_bytes > 0) map_ = std::make_unique<MappedFile>(files_, file_, path_, expected_bytes);
      buffer_ = map_ ? map_->data() : nullptr;
      return;
    }
    // In whole blocks, as O_DIRECT writes the last one; finish() cuts the file to its size.
    if (resizable_ && !options_.part) files_.reserve(file_, path_, round_up(expected_bytes, kBlockBytes));
    const bool whole_in_one_buffer =
        pool_.available() == 1 && expected_bytes != 0 && expected_bytes <= pool_.buffer_bytes();
    if (!whole_in_one_buffer) {
      async_ = open_async(files_, file_, path_, direct_, static_cast<int>(pool_.available()));
    }
    method_ = async_ ? async_->name() : "pwrite";
  } catch (...) {
    if (!options_.part) ::unlink(path_.c_str());
    throw;
  }
}

FileStream::~FileStream() { abandon(); }

void FileStream::abandon() noexcept {
  if (!owner_.here()) return static_cast<void>(async_.release());  // the file is being written by the parent
  async_.reset();                                                  // waits for what is on its way
  if (!finished_ && file_.is_open()) {
    map_.reset();
    file_.reset();
    if (!options_.part) ::unlink(path_.c_str());
  }
}

uint32_t FileStream::copy_in(const char* data, size_t bytes) {
  char* to = buffer_ + filled_;
  const auto copy = map_ ? stream_with_crc32 : copy_with_crc32;
  if (bytes < 2 * kChecksumShare || workers_.threads() == 1) return copy(to, data, bytes);
  const size_t share = round_up(std::max(kChecksumShare, bytes / static_cast<size_t>(workers_.threads()) / 4), 4096);
  std::vector<uint32_t> sums((bytes + share - 1) / share);
  workers_.parallel_for(bytes, share, [&](size_t begin, size_t end) {
    for (size_t at = begin; at < end; at += share) {
      sums[at / share] = copy(to + at, data + at, std::min(share, end - at));
    }
  });
  uint32_t sum = sums[0];
  for (size_t i = 1; i < sums.size(); ++i) sum = crc32_joined(sum, sums[i], std::min(share, bytes - i * share));
  return sum;
}

size_t FileStream::room() const {
  if (!options_.mapped) return pool_.buffer_bytes() - filled_;
  const size_t left = map_ ? map_->bytes() - filled_ : 0;
  if (left == 0) fail(ErrorKind::kRuntime, path_, " is full: more is written than was expected");
  return left;
}

uint32_t FileStream::write(const void* data, size_t bytes) {
  if (!file_.is_open()) fail(ErrorKind::kRuntime, path_, " is closed already: nothing can be written to it");
  const char* at = static_cast<const char*>(data);
  uint32_t sum = 0;
  bool first = true;
  while (bytes > 0) {
    if (buffer_ == nullptr && !options_.mapped) {
      buffer_ = pool_.take();
      if (buffer_ == nullptr) buffer_ = async_->wait();
    }
    const size_t now = std::min(bytes, room());
    const uint32_t part = copy_in(at, now);
    sum = first ? part : crc32_joined(sum, part, now);
    first = false;
    total_.crc32 = total_.bytes == 0 ? part : crc32_joined(total_.crc32, part, now);
    total_.bytes += now;
    filled_ += now;
    at += now;
    bytes -= now;
    if (!map_ && filled_ == pool_.buffer_bytes()) flush();
  }
  return sum;
}

void FileStream::pad(size_t bytes) {
  const std::vector<char> zeros(bytes, 0);
  write(zeros.data(), bytes);
}

void FileStream::flush() {
  size_t bytes = filled_;
  if (direct_) {
    bytes = round_up(filled_, kBlockBytes);
    memset(buffer_ + filled_, 0, bytes - filled_);
  }
  char* buffer = buffer_;
  buffer_ = nullptr;
  filled_ = 0;
  const uint64_t offset = written_;
  written_ += bytes;
  if (async_) {
    async_->submit_write(buffer, bytes, offset);
  } else {
    files_.write_all(file_, path_, buffer, bytes, offset);
    pool_.give_back(buffer);
  }
}

Sum FileStream::finish() {
  if (finished_) return total_;
  if (!file_.is_open()) fail(ErrorKind::kRuntime, path_, " was given up: it cannot be finished");
  if (filled_ > 0 && !map_) flush();
  map_.reset();
  if (async_) {
    while (async_->wait() != nullptr) {
    }
  }
  if (resizable_ && !options_.part) files_.truncate(file_, path_, total_.bytes);
  if (options_.sync) files_.sync(file_, path_);
  async_.reset();
  file_.reset();
  finished_ = true;
  return total_;
}

}  // namespace ds::io

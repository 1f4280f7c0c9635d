// A file written from its start to its end, past the page cache, with its checksum.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "base/process.h"
#include "base/thread_pool.h"
#include "io/memory/aligned_pool.h"
#include "io/async/async_file.h"
#include "io/files.h"
#include "io/mapped_file.h"

namespace ds::io {

struct StreamOptions {
  size_t buffer_bytes = 64 << 20;
  int buffers = 2;     // 1: fill, write, fill...; 2: fill one while the other is on its way
  int threads = 1;     // that copy and sum, the caller counted
  bool direct = true;  // O_DIRECT where the file system has it
  bool sync = true;    // fsync at the end
  // The bytes go to `begin` (a multiple of kBlockBytes) and behind it, in a file that others write, too: it is not
  // emptied first, not removed after a failure, and its size is for others to set.
  bool part = false;
  uint64_t begin = 0;
  // For a file in memory (tmpfs): it is mapped and filled in one pass, without buffers and system calls, and pages that
  // a file of that name has already are used again. The expected bytes are known, and the most that it takes; it is
  // not `direct`, no part, and not there until finish().
  bool mapped = false;
};

struct Sum {
  uint64_t bytes = 0;
  uint32_t crc32 = 0;
};

// One thread at a time. Destroyed before finish() it removes the file: a half file is of no use to anyone.
class FileStream {
 public:
  // Makes or empties `path` and reserves `expected_bytes` (0: unknown). Throws ErrorKind::kValue for options out of
  // range, FileError for what the system refuses. `files` outlives it.
  FileStream(Files& files, const std::string& path, uint64_t expected_bytes, const StreamOptions& options);
  ~FileStream();
  FileStream(const FileStream&) = delete;
  FileStream& operator=(const FileStream&) = delete;

  // Appends; the memory is the caller's again on return. Returns the checksum of these bytes. Throws FileError, also
  // for an earlier write; after that only destruction makes sense.
  uint32_t write(const void* data, size_t bytes);

  // Appends zeros, `bytes` < 2^20.
  void pad(size_t bytes);

  // Writes what is left, sets the size, syncs, closes.
  Sum finish();

  // Closes and removes the unfinished file now; nothing after finish().
  void abandon() noexcept;

  uint64_t position() const { return total_.bytes; }
  const char* method() const { return method_; }  // "libaio", "pwrite" or "mapped"
  bool direct() const { return direct_; }

 private:
  uint32_t copy_in(const char* data, size_t bytes);
  size_t room() const;  // in the buffer
  void flush();

  Files& files_;
  const std::string path_;
  const StreamOptions options_;
  bool direct_;
  bool resizable_ = true;
  bool finished_ = false;
  const OwningProcess owner_;
  AlignedPool pool_;
  ThreadPool workers_;
  Descriptor file_;
  std::unique_ptr<MappedFile> map_;   // then it is the buffer
  std::unique_ptr<AsyncFile> async_;  // after pool_ and file_: it ends first, while the kernel still uses both
  const char* method_;
  char* buffer_ = nullptr;
  size_t filled_ = 0;
  uint64_t written_;  // the offset of the next buffer
  Sum total_;
};

}  // namespace ds::io

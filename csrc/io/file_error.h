// Errors of files: what Python sees as OSError, with the number of the system's error and the path.
#pragma once
#include <cstdint>
#include <string>

#include "base/error.h"

namespace ds::io {

class FileError : public Error {
 public:
  FileError(int code, const std::string& path, const std::string& message, uint64_t offset = 0, uint64_t bytes = 0)
      : Error(ErrorKind::kRuntime, message), code_(code), path_(path), offset_(offset), bytes_(bytes) {}
  int code() const { return code_; }  // errno; ENODATA: the file ends too early
  const std::string& path() const { return path_; }
  // The range that a read or a write was to transfer. 0 bytes for other operations.
  uint64_t offset() const { return offset_; }
  uint64_t bytes() const { return bytes_; }

 private:
  int code_;
  std::string path_;
  uint64_t offset_, bytes_;
};

// fail_file(ENOSPC, "write", path, needed): throws FileError with a message that says which operation failed on which
// file, why (the system's text) and what to do about it. `needed_bytes`: what the file needs in all, 0 if unknown; for
// a full disk the message says it beside what is free.
[[noreturn]] void fail_file(int code, const char* operation, const std::string& path,
                            unsigned long long needed_bytes = 0);

// The same for `bytes` at `offset` of a file: the message and the error name both.
[[noreturn]] void fail_transfer(int code, const char* operation, const std::string& path, uint64_t offset,
                                uint64_t bytes);

// A read of `bytes` at `offset` found the end of the file at byte `end`: a FileError with ENODATA.
[[noreturn]] void fail_truncated(const std::string& path, uint64_t end, uint64_t offset, uint64_t bytes);

}  // namespace ds::io

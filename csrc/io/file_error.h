// Errors of files: what Python sees as OSError, with the number of the system's error and the path.
#pragma once
#include <string>

#include "base/error.h"

namespace ds::io {

class FileError : public Error {
 public:
  FileError(int code, const std::string& path, const std::string& message)
      : Error(ErrorKind::kRuntime, message), code_(code), path_(path) {}
  int code() const { return code_; }  // errno
  const std::string& path() const { return path_; }

 private:
  int code_;
  std::string path_;
};

// fail_file(ENOSPC, "write", path, needed): throws FileError with a message that says which operation failed on which
// file, why (the system's text) and what to do about it. `needed_bytes`: what the file needs in all, 0 if unknown; for
// a full disk the message says it beside what is free.
[[noreturn]] void fail_file(int code, const char* operation, const std::string& path,
                            unsigned long long needed_bytes = 0);

}  // namespace ds::io

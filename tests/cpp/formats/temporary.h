// A file of a test, removed at its end.
#pragma once
#include <stdlib.h>
#include <unistd.h>

#include <string>

namespace ds::formats {

class Temporary {
 public:
  explicit Temporary(const std::string& what) : path_("/tmp/ds_formats_" + what + "_XXXXXX") {
    ::close(::mkstemp(path_.data()));
  }
  ~Temporary() { ::unlink(path_.c_str()); }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace ds::formats

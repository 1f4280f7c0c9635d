// A file that stays what it was when it was opened first, read by offset.
#pragma once
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "io/descriptor.h"
#include "io/range_reader.h"

namespace ds::formats {

// The identity of a file, to detect that another one has taken its name.
struct FileIdentity {
  uint64_t device = 0, inode = 0, bytes = 0;
  int64_t changed_ns = 0;
  bool operator==(const FileIdentity& other) const {
    return std::tie(device, inode, bytes, changed_ns) ==
           std::tie(other.device, other.inode, other.bytes, other.changed_ns);
  }
};

class CheckedFile {
 public:
  explicit CheckedFile(const std::string& path);  // io::FileError
  const std::string& path() const { return path_; }
  const FileIdentity& identity() const { return identity_; }
  uint64_t bytes() const { return identity_.bytes; }

  // Throws io::FileError; ErrorKind::kRuntime when the file ends before.
  void read(void* to, uint64_t bytes, uint64_t offset) const;
  std::string text(uint64_t offset, uint64_t bytes) const;

 private:
  std::string path_;
  io::Descriptor file_;
  FileIdentity identity_;
};

// Fills every range, large ones in pieces on up to `threads` >= 1 threads; memory that has no pages yet gets huge ones,
// where the system has them. io::FileError when the file at `path` is no longer `identity`, or cannot be read.
void read_ranges(const std::string& path, const FileIdentity& identity, const std::vector<io::Range>& ranges,
                 int threads);

}  // namespace ds::formats

// A file in memory (tmpfs) that is filled where it lies.
#pragma once
#include <cstdint>
#include <string>

#include "io/descriptor.h"
#include "io/files.h"

namespace ds::io {

// The first `bytes` >= 1 of an open file, which becomes so long, in memory with all pages in place. Pages that it has
// already are used again: finding and clearing others takes as long as filling them.
class MappedFile {
 public:
  // Throws FileError, also when there is no room.
  MappedFile(Files& files, const Descriptor& file, const std::string& path, uint64_t bytes);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  uint64_t bytes_;
  char* data_;
};

}  // namespace ds::io

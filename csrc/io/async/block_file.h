// A file for transfers at any offset, of any size: whole blocks go past the page cache, what is left at both ends of a
// range goes through it.
#pragma once
#include <cstdint>
#include <string>

#include "io/files.h"

namespace ds::io {

class BlockFile {
 public:
  enum class Mode { kRead, kWrite };  // kWrite: made if it is not there, and neither emptied nor shortened

  // `direct`: O_DIRECT where the file system has it. Throws FileError.
  BlockFile(Files& files, const std::string& path, Mode mode, bool direct = true);
  // A file that somebody else has open, and closes after this is gone. O_DIRECT if that descriptor has it.
  BlockFile(Files& files, int number, Mode mode);

  const std::string& path() const { return path_; }
  const Descriptor& direct() const { return borrowed_ ? borrowed_file_ : file_; }
  const Descriptor& buffered() const { return has_direct_ ? tail_ : direct(); }
  bool has_direct() const { return has_direct_; }
  // Multiple that O_DIRECT wants of addresses, a power of two; 1 without O_DIRECT. Offsets and sizes: kBlockBytes.
  size_t address_multiple() const { return address_multiple_; }
  uint64_t bytes() const;  // Throws FileError.

  // Makes the file at least `end` long and finds blocks for what is new: writes behind the end of a file wait for each
  // other, and a full disk is an error now. The error names `offset` and the `bytes` that are to be written there.
  void reserve(uint64_t end, uint64_t offset, uint64_t bytes);

  Files& files() const { return files_; }

  BlockFile(const BlockFile&) = delete;
  BlockFile& operator=(const BlockFile&) = delete;
  ~BlockFile();

 private:
  void open_tail(const std::string& path, Mode mode);

  Files& files_;
  std::string path_;
  bool has_direct_;
  bool borrowed_ = false;
  size_t address_multiple_ = 1;
  Descriptor file_;
  Descriptor borrowed_file_;  // not closed
  Descriptor tail_;           // without O_DIRECT, where file_ has it
};

}  // namespace ds::io

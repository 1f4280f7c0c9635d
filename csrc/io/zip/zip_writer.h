// A store-only zip file, written entry by entry in the order of its layout.
#pragma once
#include "io/file_stream.h"
#include "io/zip/zip_layout.h"

namespace ds::io {

class ZipWriter {
 public:
  // Sizes are known beforehand, so every offset is, too. `files` outlives it.
  ZipWriter(Files& files, const std::string& path, std::vector<ZipEntry> entries, const StreamOptions& options);

  const ZipLayout& layout() const { return layout_; }
  const char* method() const { return stream_.method(); }

  // The next bytes of the current entry, which ends when all it announced are there. Throws ErrorKind::kValue for more.
  // Entries without bytes pass by themselves.
  void write(const void* data, size_t bytes);

  // The number of complete entries, and the checksum of each of them.
  size_t complete() const { return crc32_.size(); }
  const std::vector<uint32_t>& crc32() const { return crc32_; }

  // Directory, size, fsync. Throws ErrorKind::kValue when an entry is not complete.
  Sum finish();

  void abandon() noexcept { stream_.abandon(); }  // see FileStream

 private:
  void begin();

  ZipLayout layout_;
  FileStream stream_;
  std::vector<uint32_t> crc32_;
  uint64_t left_ = 0;  // of the current entry
  uint32_t current_ = 0;
};

}  // namespace ds::io

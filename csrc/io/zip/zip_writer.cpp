#include "io/zip/zip_writer.h"

#include "base/error.h"

#include "io/crc32.h"

namespace ds::io {

ZipWriter::ZipWriter(Files& files, const std::string& path, std::vector<ZipEntry> entries, const StreamOptions& options)
    : layout_(std::move(entries)), stream_(files, path, layout_.file_bytes(), options) {
  begin();
}

void ZipWriter::begin() {
  while (crc32_.size() < layout_.entries().size()) {
    const std::string header = layout_.local_header(crc32_.size());
    stream_.write(header.data(), header.size());
    left_ = layout_.entries()[crc32_.size()].bytes;
    current_ = 0;
    if (left_ > 0) return;
    crc32_.push_back(0);
  }
}

void ZipWriter::write(const void* data, size_t bytes) {
  if (bytes == 0) return;
  if (bytes > left_) {
    fail(ErrorKind::kValue, "the entry ",
         complete() < layout_.entries().size() ? layout_.entries()[complete()].name : "behind the last", " takes ",
         left_, " more bytes, got ", bytes);
  }
  const uint64_t before = layout_.entries()[complete()].bytes - left_;
  const uint32_t sum = stream_.write(data, bytes);
  current_ = before == 0 ? sum : crc32_joined(current_, sum, bytes);
  left_ -= bytes;
  if (left_ > 0) return;
  const std::string descriptor = layout_.descriptor(complete(), current_);
  stream_.write(descriptor.data(), descriptor.size());
  crc32_.push_back(current_);
  begin();
}

Sum ZipWriter::finish() {
  if (complete() < layout_.entries().size()) {
    fail(ErrorKind::kValue, "the entry ", layout_.entries()[complete()].name, " lacks ", left_, " bytes");
  }
  const std::string directory = layout_.directory(crc32_);
  stream_.write(directory.data(), directory.size());
  return stream_.finish();
}

}  // namespace ds::io

// The layout of a store-only zip file: integers and headers, no file.
//
// The layout is the one torch.save writes: the data of every entry starts at a multiple of 64 bytes, behind padding in
// an extra field "FB"; the checksum follows the data (a data descriptor) and stands in the directory. Sizes and offsets
// of 4 GiB and more take zip64 fields. Format: PKWARE's APPNOTE.TXT, sections 4.3 to 4.5.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ds::io {

struct ZipEntry {
  std::string name;
  uint64_t bytes = 0;
};

class ZipLayout {
 public:
  static constexpr uint64_t kAlignment = 64;

  // Throws ErrorKind::kValue for an empty or doubled name, or one of more than 65535 bytes.
  explicit ZipLayout(std::vector<ZipEntry> entries);

  const std::vector<ZipEntry>& entries() const { return entries_; }
  uint64_t header_offset(size_t entry) const { return header_offsets_[entry]; }
  uint64_t data_offset(size_t entry) const { return data_offsets_[entry]; }
  uint64_t file_bytes() const { return file_bytes_; }

  // Stands before the data of the entry, padding included: from header_offset to data_offset.
  std::string local_header(size_t entry) const;

  // Stands behind the data; empty for an entry without bytes.
  std::string descriptor(size_t entry, uint32_t crc32) const;

  // Ends the file. One checksum for each entry.
  std::string directory(const std::vector<uint32_t>& crc32) const;

 private:
  std::vector<ZipEntry> entries_;
  std::vector<uint64_t> header_offsets_;
  std::vector<uint64_t> data_offsets_;
  uint64_t directory_offset_ = 0;
  uint64_t file_bytes_ = 0;
};

}  // namespace ds::io

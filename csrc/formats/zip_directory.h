// The directory of a zip file, by offsets (PKWARE APPNOTE 6.3, zip64 included): every record's offset is checked
// against the file and its neighbours, and a stored record is a range of the file that can be read from anywhere.
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "formats/checked_file.h"

namespace ds::formats {

// The bytes of a record. packed: deflated, `stored` bytes of the file that grow to `bytes`.
struct ZipRecord {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t stored = 0;
  uint32_t crc32 = 0;
  bool packed = false;
};

class ZipDirectory {
 public:
  // DamagedZip for a directory that contradicts itself: overlapping, encrypted or repeated records, records outside of
  // the file, names that leave the archive; FileError. The file must stay open as long as this is asked.
  explicit ZipDirectory(const CheckedFile& file);

  const std::vector<std::string>& names() const { return names_; }  // in the order of the directory
  bool has(const std::string& name) const { return entries_.count(name) > 0; }

  // The position of a record's data. DamagedZip if the record is not at the position that the directory gives.
  ZipRecord record(const std::string& name) const;

  // Bytes [start, start + count) of a packed record, unpacked, to `to`. DamagedZip for data that do not unpack to what
  // the directory says.
  void unpack(const std::string& name, uint64_t start, uint64_t count, void* to) const;

 private:
  struct Entry {
    bool packed;
    uint64_t header, stored, bytes, limit;
    uint32_t crc32;
  };
  void read_entries(const std::string& directory, uint64_t count, uint64_t directory_offset);
  void check_offsets(uint64_t directory_offset);

  const CheckedFile& file_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, Entry> entries_;
};

}  // namespace ds::formats

// Files of torch.save: the zip of torch 1.6 and later, and the older stream of pickles. What is in them, without
// tensors.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "formats/checked_file.h"
#include "formats/pickle_graph.h"
#include "formats/pickle_names.h"
#include "formats/zip_directory.h"

namespace ds::formats {

// The bytes of one storage.
struct StorageRecord {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  bool packed = false;  // then it is read by ZipDirectory::unpack
  std::string record;   // of the zip
};

class TorchArchive {
 public:
  // DamagedPickle, DamagedZip or io::FileError for a file that is no such file.
  explicit TorchArchive(const std::string& path);

  const CheckedFile& file() const { return file_; }
  bool swapped() const { return swapped_; }  // of the other byte order
  bool legacy() const { return zip_ == nullptr; }

  // Its structure, which points into this object. Every storage that it names has its record_of() then.
  PickleGraph read_structure(NameResolver& names);

  // The bytes that Python's own machine would read from, for files that may do as they please.
  std::string_view structure() const { return structure_; }
  // For that machine: the bytes of a storage. DamagedPickle, DamagedZip.
  StorageRecord record_of(const StoredMemory& memory);
  // Legacy: behind the structure, which ends at `position`, stand the storages.
  void find_legacy_storages(uint64_t position, const std::vector<StoredMemory>& named);

 private:
  void open_zip();
  void open_legacy();
  void map();
  void check(const StoredMemory& memory);

  CheckedFile file_;
  std::unique_ptr<ZipDirectory> zip_;
  std::string root_, owned_;
  std::shared_ptr<void> mapped_;
  std::string_view structure_;
  uint64_t begin_ = 0;
  bool swapped_ = false;
  std::unordered_map<std::string, StorageRecord> records_;
};

}  // namespace ds::formats

// One range of a store-only zip file, written by one of several processes that each write theirs.
#pragma once
#include "io/file_stream.h"
#include "io/zip/zip_layout.h"

namespace ds::io {

// Bytes of one entry.
struct ZipRun {
  size_t entry;
  uint64_t offset;
  uint64_t bytes;
};

class ZipPart {
 public:
  // Bytes `begin` to `end` of the file, which is made if it is not there, and not emptied. `begin` is a multiple of
  // kBlockBytes, and so is `end` unless nobody writes behind it. `files` outlives it. Throws ErrorKind::kValue.
  ZipPart(Files& files, const std::string& path, std::vector<ZipEntry> entries, uint64_t begin, uint64_t end,
          const StreamOptions& options);

  // The runs of entries in the part, in order.
  const std::vector<ZipRun>& runs() const { return runs_; }

  // The next bytes of the runs. What stands between them is written, too, but for the checksum behind an entry whose
  // bytes are not all here: zeros, for who knows it to replace.
  void write(const void* data, size_t bytes);

  const std::vector<uint32_t>& crc32() const { return crc32_; }  // of each run that is complete

  Sum finish();                                   // Throws ErrorKind::kValue when a run is not complete.
  void abandon() noexcept { stream_.abandon(); }  // closes; the file stays, others write it

 private:
  enum class Kind { kHeader, kData, kDescriptor };
  struct Segment {
    Kind kind;
    size_t entry;
    uint64_t offset;  // from the beginning of the header, data or descriptor
    uint64_t bytes;
  };
  void write_texts();
  bool is_whole(size_t run) const;

  ZipLayout layout_;
  std::vector<Segment> segments_;
  std::vector<ZipRun> runs_;
  FileStream stream_;
  size_t next_ = 0;    // segment
  uint64_t left_ = 0;  // of the current run
  uint32_t current_ = 0;
  std::vector<uint32_t> crc32_;
};

}  // namespace ds::io

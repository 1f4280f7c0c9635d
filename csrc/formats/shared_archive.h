// One archive of torch.save that several processes with equal contents write together: each writes one range of it.
//
// The layout of a zip archive is known before anything is written, so they need nothing of each other but that. What
// stands behind a tensor is its checksum; where a tensor is cut, the one that leads puts it there at the end, with the
// directory.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "formats/prepared_file.h"
#include "io/zip/zip_layout.h"

namespace ds::formats {

// Bytes `begin` to `end` of a tensor.
struct EntryRun {
  size_t entry;
  uint64_t begin, end;
};

// A run that a writer has written: `bytes` bytes of `entry` from `offset` on.
struct WrittenRun {
  size_t entry;
  uint64_t offset, bytes;
  uint32_t crc32;
};

// The offsets at which `count` writers divide the file. The first `texts` entries are no tensors and belong to the
// first writer; the last two are written at the end.
class ArchiveCuts {
 public:
  ArchiveCuts(std::vector<io::ZipEntry> entries, size_t texts, size_t count);

  const io::ZipLayout& layout() const { return layout_; }
  size_t texts() const { return texts_; }
  size_t tail() const { return layout_.entries().size() - 2; }  // the first of the last two
  // The bytes of the file that a writer writes; empty where it has nothing to write.
  std::pair<uint64_t, uint64_t> part(size_t index) const { return {bounds_.at(index), bounds_.at(index + 1)}; }
  std::vector<EntryRun> runs(size_t index) const;  // of tensors
  // Whether one writer has all of its bytes and the checksum behind them.
  bool is_in_one_part(size_t entry) const;

 private:
  io::ZipLayout layout_;
  size_t texts_;
  std::vector<uint64_t> bounds_;
};

// One writer's part of a file. `sources` as in PreparedFile.
class ArchivePart {
 public:
  ArchivePart(const TorchZipFile& file, ArchiveCuts cuts, size_t index);

  uint64_t bytes() const { return end_ - begin_; }
  std::vector<WrittenRun> write(io::Files& files, const std::string& path, const io::StreamOptions& options,
                                io::Staging& staging) const;

  std::vector<io::SourcePtr> sources;

 private:
  ArchiveCuts cuts_;
  uint64_t begin_, end_;
  std::vector<std::string> texts_;  // the first one's
};

// Ends the file when all writers have written their ranges. `runs`: of every writer, in any order. io::FileError;
// ErrorKind::kRuntime where bytes of a tensor are missing.
FileRecord complete_archive(const std::string& path, const TorchZipFile& file, const ArchiveCuts& cuts,
                            std::vector<WrittenRun> runs);

}  // namespace ds::formats

// A file of a checkpoint before it is written: what stands in it where, and sources of its bytes.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "io/byte_source.h"
#include "io/file_stream.h"
#include "io/zip/zip_layout.h"

namespace ds::formats {

// A tensor of a file that is written: its bytes, with their CRC-32.
struct TensorRecord {
  std::string name, dtype;
  std::vector<int64_t> shape;
  uint64_t offset = 0, bytes = 0;
  uint32_t crc32 = 0;
};

struct FileRecord {
  uint64_t bytes = 0;
  uint32_t crc32 = 0;
  std::vector<TensorRecord> tensors;
};

// A tensor of a file that is not: several may have one source.
struct NamedTensor {
  std::string name, dtype;
  std::vector<int64_t> shape;
  size_t source = 0;
};

// The position of a source in the file.
struct WrittenBytes {
  uint64_t offset = 0, bytes = 0;
  uint32_t crc32 = 0;
};

class PreparedFile {
 public:
  virtual ~PreparedFile() = default;
  // `staging`: for sources that are not in memory. io::FileError; there is no file then.
  virtual FileRecord write(io::Files& files, const std::string& path, const io::StreamOptions& options,
                           io::Staging& staging) const = 0;

  // In the order of the file. A caller that changes the tensors before the file is written puts copies of equal size
  // there.
  std::vector<io::SourcePtr> sources;

  // The record of the file; of several tensors with a name, the first. `written`: of each source.
  FileRecord record(const io::Sum& file, const std::vector<WrittenBytes>& written) const;

 protected:
  std::vector<NamedTensor> tensors_;
};

// Plain bytes.
class BytesFile : public PreparedFile {
 public:
  explicit BytesFile(std::string data) : data_(std::move(data)) {}
  FileRecord write(io::Files& files, const std::string& path, const io::StreamOptions& options,
                   io::Staging& staging) const override;

 private:
  std::string data_;
};

// The zip archive of torch.save since torch 1.6: records in the order that readers of offsets rely on.
class TorchZipFile : public PreparedFile {
 public:
  static constexpr const char* kVersion = "3\n";
  // pickled: the structure; keys: the names of the sources in it.
  TorchZipFile(std::string pickled, std::vector<std::string> keys, std::vector<io::SourcePtr> made,
               std::vector<NamedTensor> tensors);
  FileRecord write(io::Files& files, const std::string& path, const io::StreamOptions& options,
                   io::Staging& staging) const override;

  // The bytes before the tensors, in order.
  const std::vector<std::string>& texts() const { return texts_; }
  // Everything: the texts, the tensors, the version and the id.
  std::vector<io::ZipEntry> entries() const;

 private:
  std::vector<std::string> texts_, keys_;
};

// 40 digits that tell archives of different content apart, as torch 2 writes them. One checksum for each entry but the
// last, which is this.
std::string serialization_id(const std::vector<io::ZipEntry>& entries, const std::vector<uint32_t>& crc32);

// The older format of torch.save: pickles, then each storage after the number of its elements.
class TorchStreamFile : public PreparedFile {
 public:
  // head: the five pickles. counts: elements of each source.
  TorchStreamFile(std::string head, std::vector<uint64_t> counts, std::vector<io::SourcePtr> made,
                  std::vector<NamedTensor> tensors);
  FileRecord write(io::Files& files, const std::string& path, const io::StreamOptions& options,
                   io::Staging& staging) const override;

 private:
  std::string head_;
  std::vector<uint64_t> counts_;
};

// 8 bytes of length, a JSON header padded with spaces to a multiple of 8, the tensors in row-major order
// (huggingface.co/docs/safetensors).
class SafetensorsFile : public PreparedFile {
 public:
  // tensors: each with its own source, in order; wide elements first, so that all are aligned. metadata: text to text.
  SafetensorsFile(std::vector<NamedTensor> tensors, std::vector<io::SourcePtr> made,
                  const std::vector<std::pair<std::string, std::string>>& metadata);
  FileRecord write(io::Files& files, const std::string& path, const io::StreamOptions& options,
                   io::Staging& staging) const override;

 private:
  std::string header_;
};

}  // namespace ds::formats

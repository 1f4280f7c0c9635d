#include "formats/prepared_file.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/error.h"
#include "formats/element.h"
#include "io/crc32.h"
#include "io/zip/zip_writer.h"

namespace ds::formats {
namespace {

std::string little64(uint64_t value) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  return bytes;
}

WrittenBytes write_source(io::FileStream& stream, const io::ByteSource& source, io::Staging& staging) {
  WrittenBytes made{stream.position(), source.bytes(), 0};
  source.each(staging, [&](const void* data, uint64_t bytes) {
    made.crc32 = io::crc32_joined(made.crc32, stream.write(data, bytes), bytes);
  });
  return made;
}

uint64_t bytes_of(const std::vector<io::SourcePtr>& sources) {
  uint64_t bytes = 0;
  for (const io::SourcePtr& source : sources) bytes += source->bytes();
  return bytes;
}

}  // namespace

FileRecord PreparedFile::record(const io::Sum& file, const std::vector<WrittenBytes>& written) const {
  FileRecord made{file.bytes, file.crc32, {}};
  std::unordered_set<std::string_view> known;
  for (const NamedTensor& tensor : tensors_) {
    const WrittenBytes& bytes = written.at(tensor.source);
    if (!known.insert(tensor.name).second) continue;
    made.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, bytes.offset, bytes.bytes, bytes.crc32});
  }
  return made;
}

FileRecord BytesFile::write(io::Files& files, const std::string& path, const io::StreamOptions& options,
                            io::Staging&) const {
  io::FileStream stream(files, path, data_.size(), options);
  stream.write(data_.data(), data_.size());
  return record(stream.finish(), {});
}

// ---- zip archives
TorchZipFile::TorchZipFile(std::string pickled, std::vector<std::string> keys, std::vector<io::SourcePtr> made,
                           std::vector<NamedTensor> tensors)
    : texts_{std::move(pickled), "1", "64", "little"}, keys_(std::move(keys)) {
  sources = std::move(made);
  tensors_ = std::move(tensors);
}

std::vector<io::ZipEntry> TorchZipFile::entries() const {
  constexpr const char* kNames[] = {"data.pkl", ".format_version", ".storage_alignment", "byteorder"};
  std::vector<io::ZipEntry> found;
  for (size_t i = 0; i < texts_.size(); ++i) found.push_back({std::string("archive/") + kNames[i], texts_[i].size()});
  for (size_t i = 0; i < keys_.size(); ++i) found.push_back({"archive/data/" + keys_[i], sources[i]->bytes()});
  found.push_back({"archive/version", 2});
  found.push_back({"archive/.data/serialization_id", 40});
  return found;
}

FileRecord TorchZipFile::write(io::Files& files, const std::string& path, const io::StreamOptions& options,
                               io::Staging& staging) const {
  const std::vector<io::ZipEntry> all = entries();
  io::ZipWriter writer(files, path, all, options);
  const auto put = [&](const std::string& text) { writer.write(text.data(), text.size()); };
  for (const std::string& text : texts_) put(text);
  for (const io::SourcePtr& source : sources) {
    source->each(staging, [&](const void* data, uint64_t bytes) { writer.write(data, bytes); });
  }
  put(kVersion);
  put(serialization_id(all, writer.crc32()));
  const io::Sum sum = writer.finish();
  std::vector<WrittenBytes> written;
  for (size_t i = texts_.size(); i < texts_.size() + sources.size(); ++i) {
    written.push_back({writer.layout().data_offset(i), all[i].bytes, writer.crc32()[i]});
  }
  return record(sum, written);
}

std::string serialization_id(const std::vector<io::ZipEntry>& entries, const std::vector<uint32_t>& crc32) {
  std::string names, sums;
  for (const io::ZipEntry& entry : entries) names += entry.name;
  for (const uint32_t sum : crc32) sums += little64(sum).substr(0, 4);
  char text[41];
  std::snprintf(text, sizeof(text), "%020u%020u", io::crc32_of(names.data(), names.size()),
                io::crc32_of(sums.data(), sums.size()));
  return text;
}

// ---- streams
TorchStreamFile::TorchStreamFile(std::string head, std::vector<uint64_t> counts, std::vector<io::SourcePtr> made,
                                 std::vector<NamedTensor> tensors)
    : head_(std::move(head)), counts_(std::move(counts)) {
  sources = std::move(made);
  tensors_ = std::move(tensors);
}

FileRecord TorchStreamFile::write(io::Files& files, const std::string& path, const io::StreamOptions& options,
                                  io::Staging& staging) const {
  io::FileStream stream(files, path, head_.size() + 8 * sources.size() + bytes_of(sources), options);
  stream.write(head_.data(), head_.size());
  std::vector<WrittenBytes> written;
  for (size_t i = 0; i < sources.size(); ++i) {
    const std::string count = little64(counts_[i]);
    stream.write(count.data(), count.size());
    written.push_back(write_source(stream, *sources[i], staging));
  }
  return record(stream.finish(), written);
}

// ---- safetensors
SafetensorsFile::SafetensorsFile(std::vector<NamedTensor> tensors, std::vector<io::SourcePtr> made,
                                 const std::vector<std::pair<std::string, std::string>>& metadata) {
  sources = std::move(made);
  tensors_ = std::move(tensors);
  // Put together here: an object of the JSON library looks through all its keys for each new one.
  const auto quoted = [](const std::string& text) { return nlohmann::json(text).dump(); };
  std::string entries;
  for (const auto& [key, text] : metadata) {
    entries += (entries.empty() ? "" : ",") + quoted(key) + ":" + quoted(text);
  }
  if (!metadata.empty()) entries = "\"__metadata__\":{" + entries + "}";
  uint64_t at = 0;
  for (const NamedTensor& tensor : tensors_) {
    const uint64_t end = at + sources[tensor.source]->bytes();
    const std::string_view code = safetensors_code(tensor.dtype);
    if (code.empty()) {
      fail(ErrorKind::kValue, "the tensor '", tensor.name, "' is torch.", tensor.dtype,
           ", which safetensors has no name for: convert it");
    }
    const nlohmann::ordered_json about = {
        {"dtype", code}, {"shape", tensor.shape}, {"data_offsets", std::vector<uint64_t>{at, end}}};
    entries += (entries.empty() ? "" : ",") + quoted(tensor.name) + ":" + about.dump();
    at = end;
  }
  header_ = "{" + entries + "}";
  header_.append((8 - header_.size() % 8) % 8, ' ');
}

FileRecord SafetensorsFile::write(io::Files& files, const std::string& path, const io::StreamOptions& options,
                                  io::Staging& staging) const {
  const std::string head = little64(header_.size()) + header_;
  io::FileStream stream(files, path, head.size() + bytes_of(sources), options);
  stream.write(head.data(), head.size());
  std::vector<WrittenBytes> written;
  for (const io::SourcePtr& source : sources) written.push_back(write_source(stream, *source, staging));
  return record(stream.finish(), written);
}

}  // namespace ds::formats

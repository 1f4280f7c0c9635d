#include "formats/shared_archive.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <tuple>

#include "base/error.h"
#include "base/ranges.h"
#include "io/crc32.h"
#include "io/descriptor.h"
#include "io/file_error.h"
#include "io/zip/zip_part.h"

namespace ds::formats {
namespace {

constexpr uint64_t kBlock = 4096;  // parts begin at multiples of it

uint64_t round_up(uint64_t value) { return (value + kBlock - 1) / kBlock * kBlock; }

uint32_t sum_of(const std::string& text) { return io::crc32_of(text.data(), text.size()); }

void put_at(const io::Descriptor& file, const std::string& path, const std::string& text, uint64_t offset) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t put = ::pwrite(file.get(), text.data() + done, text.size() - done, static_cast<off_t>(offset + done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) io::fail_file(put < 0 ? errno : EIO, "write", path);
    done += static_cast<size_t>(put);
  }
}

}  // namespace

ArchiveCuts::ArchiveCuts(std::vector<io::ZipEntry> entries, size_t texts, size_t count)
    : layout_(std::move(entries)), texts_(texts), bounds_{0} {
  const uint64_t end = layout_.header_offset(tail());
  const uint64_t first = std::min(round_up(layout_.header_offset(texts)), end);
  for (size_t i = 1; i < count; ++i) bounds_.push_back(std::max(first, end * i / count / kBlock * kBlock));
  bounds_.push_back(end);
}

std::vector<EntryRun> ArchiveCuts::runs(size_t index) const {
  const auto [begin, end] = part(index);
  std::vector<EntryRun> found;
  for (size_t entry = texts_; entry < tail(); ++entry) {
    const uint64_t data = layout_.data_offset(entry);
    const uint64_t first = std::max(begin, data), last = std::min(end, data + layout_.entries()[entry].bytes);
    if (first < last) found.push_back({entry, first - data, last - data});
  }
  return found;
}

bool ArchiveCuts::is_in_one_part(size_t entry) const {
  const uint64_t data = layout_.data_offset(entry);
  const uint64_t end = data + layout_.entries()[entry].bytes + layout_.descriptor(entry, 0).size();
  for (size_t i = 0; i + 1 < bounds_.size(); ++i) {
    if (bounds_[i] <= data && end <= bounds_[i + 1]) return true;
  }
  return false;
}

ArchivePart::ArchivePart(const TorchZipFile& file, ArchiveCuts cuts, size_t index) : cuts_(std::move(cuts)) {
  std::tie(begin_, end_) = cuts_.part(index);
  if (index == 0) texts_ = file.texts();
  for (const EntryRun& run : cuts_.runs(index)) {
    sources.push_back(
        std::make_shared<io::SlicedSource>(file.sources.at(run.entry - cuts_.texts()), run.begin, run.end));
  }
}

std::vector<WrittenRun> ArchivePart::write(io::Files& files, const std::string& path, const io::StreamOptions& options,
                                           io::Staging& staging) const {
  if (begin_ == end_) return {};
  io::ZipPart part(files, path, cuts_.layout().entries(), begin_, end_, options);
  for (const std::string& text : texts_) part.write(text.data(), text.size());
  for (const io::SourcePtr& source : sources) {
    source->each(staging, [&](const void* data, uint64_t bytes) { part.write(data, bytes); });
  }
  part.finish();
  std::vector<WrittenRun> made;
  for (size_t i = 0; i < part.runs().size(); ++i) {
    const io::ZipRun& run = part.runs()[i];
    made.push_back({run.entry, run.offset, run.bytes, part.crc32().at(i)});
  }
  return made;
}

FileRecord complete_archive(const std::string& path, const TorchZipFile& file, const ArchiveCuts& cuts,
                            std::vector<WrittenRun> runs) {
  const io::ZipLayout& layout = cuts.layout();
  const std::vector<io::ZipEntry>& entries = layout.entries();
  std::vector<uint32_t> sums(entries.size());
  std::vector<uint64_t> lengths(entries.size());
  sort(runs, [](const WrittenRun& a, const WrittenRun& b) {
    return std::tie(a.entry, a.offset) < std::tie(b.entry, b.offset);
  });
  for (const WrittenRun& run : runs) {
    uint64_t& length = lengths.at(run.entry);
    if (run.offset != length) {
      fail(ErrorKind::kRuntime, "bytes ", length, " to ", run.offset, " of ", entries[run.entry].name, " in ", path,
           " are missing");
    }
    sums[run.entry] = length > 0 ? io::crc32_joined(sums[run.entry], run.crc32, run.bytes) : run.crc32;
    length += run.bytes;
  }
  for (size_t entry = 0; entry < cuts.tail(); ++entry) {
    if (lengths[entry] == entries[entry].bytes) continue;
    fail(ErrorKind::kRuntime, entries[entry].name, " in ", path, " has ", lengths[entry], " of ", entries[entry].bytes,
         " bytes");
  }
  const std::string version = TorchZipFile::kVersion;
  sums[cuts.tail()] = sum_of(version);
  const std::string id = serialization_id(entries, {sums.begin(), sums.end() - 1});
  sums.back() = sum_of(id);
  std::string tail;
  for (const auto& [entry, text] : {std::pair(cuts.tail(), version), std::pair(cuts.tail() + 1, id)}) {
    tail += layout.local_header(entry) + text + layout.descriptor(entry, sums[entry]);
  }
  tail += layout.directory(sums);

  const io::Descriptor out(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (!out.is_open()) io::fail_file(errno, "open", path);
  uint32_t total = 0;
  std::vector<WrittenBytes> written;
  for (size_t entry = 0; entry < cuts.tail(); ++entry) {
    const uint64_t data = layout.data_offset(entry), bytes = entries[entry].bytes;
    const std::string head = layout.local_header(entry), descriptor = layout.descriptor(entry, sums[entry]);
    if (!cuts.is_in_one_part(entry)) put_at(out, path, descriptor, data + bytes);
    const std::pair<uint32_t, uint64_t> parts[] = {
        {sum_of(head), head.size()}, {sums[entry], bytes}, {sum_of(descriptor), descriptor.size()}};
    for (const auto& [sum, size] : parts) {
      if (size > 0) total = io::crc32_joined(total, sum, size);
    }
    if (entry >= cuts.texts()) written.push_back({data, bytes, sums[entry]});
  }
  put_at(out, path, tail, layout.header_offset(cuts.tail()));
  if (::ftruncate(out.get(), static_cast<off_t>(layout.file_bytes())) != 0) io::fail_file(errno, "ftruncate", path);
  if (::fsync(out.get()) != 0) io::fail_file(errno, "fsync", path);
  return file.record({layout.file_bytes(), io::crc32_joined(total, sum_of(tail), tail.size())}, written);
}

}  // namespace ds::formats

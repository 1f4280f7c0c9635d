#include "io/zip/zip_part.h"

#include <algorithm>

#include "base/error.h"
#include "io/memory/aligned_pool.h"
#include "io/crc32.h"

namespace ds::io {
namespace {

StreamOptions part_options(StreamOptions options, uint64_t begin, uint64_t end) {
  if (begin % kBlockBytes != 0 || begin >= end) {
    fail(ErrorKind::kValue, "a part of a file begins at a multiple of ", kBlockBytes, " before its end, got ", begin,
         " to ", end);
  }
  options.part = true;
  options.begin = begin;
  return options;
}

}  // namespace

ZipPart::ZipPart(Files& files, const std::string& path, std::vector<ZipEntry> entries, uint64_t begin, uint64_t end,
                 const StreamOptions& options)
    : layout_(std::move(entries)), stream_(files, path, end - begin, part_options(options, begin, end)) {
  const auto add = [&](Kind kind, size_t entry, uint64_t from, uint64_t bytes) {
    const uint64_t first = std::max(from, begin);
    const uint64_t last = std::min(from + bytes, end);
    if (first >= last) return;
    segments_.push_back({kind, entry, first - from, last - first});
    if (kind == Kind::kData) runs_.push_back({entry, first - from, last - first});
  };
  for (size_t i = 0; i < layout_.entries().size(); ++i) {
    const uint64_t data = layout_.data_offset(i);
    const uint64_t bytes = layout_.entries()[i].bytes;
    add(Kind::kHeader, i, layout_.header_offset(i), data - layout_.header_offset(i));
    add(Kind::kData, i, data, bytes);
    add(Kind::kDescriptor, i, data + bytes, layout_.descriptor(i, 0).size());
  }
  write_texts();
}

bool ZipPart::is_whole(size_t run) const { return runs_[run].bytes == layout_.entries()[runs_[run].entry].bytes; }

void ZipPart::write_texts() {
  for (; next_ < segments_.size(); ++next_) {
    const Segment& segment = segments_[next_];
    if (segment.kind == Kind::kData) {
      left_ = segment.bytes;
      current_ = 0;
      return;
    }
    std::string text;
    if (segment.kind == Kind::kHeader) {
      text = layout_.local_header(segment.entry);
    } else {
      const size_t last = crc32_.size() - 1;
      const bool known = !crc32_.empty() && runs_[last].entry == segment.entry && is_whole(last);
      text = known ? layout_.descriptor(segment.entry, crc32_[last])
                   : std::string(layout_.descriptor(segment.entry, 0).size(), '\0');
    }
    stream_.write(text.data() + segment.offset, segment.bytes);
  }
}

void ZipPart::write(const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    if (next_ == segments_.size()) fail(ErrorKind::kValue, "the part of the file is complete, got ", bytes, " more");
    const size_t now = static_cast<size_t>(std::min<uint64_t>(bytes, left_));
    const bool first = left_ == segments_[next_].bytes;
    const uint32_t sum = stream_.write(at, now);
    current_ = first ? sum : crc32_joined(current_, sum, now);
    at += now;
    bytes -= now;
    left_ -= now;
    if (left_ > 0) continue;
    crc32_.push_back(current_);
    ++next_;
    write_texts();
  }
}

Sum ZipPart::finish() {
  if (next_ < segments_.size()) fail(ErrorKind::kValue, "the part of the file lacks ", left_, " bytes of a run");
  return stream_.finish();
}

}  // namespace ds::io

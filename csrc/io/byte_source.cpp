#include "io/byte_source.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/ranges.h"

namespace ds::io {
namespace {

// Calls part(index, first, last, at) for what bytes `begin` to `end` of things end to end have of each of them: its
// bytes `first` to `last`, which are `at` bytes behind `begin`.
template <typename Sizes, typename Part>
void in_common(const Sizes& sizes, size_t count, uint64_t begin, uint64_t end, const Part& part) {
  uint64_t at = 0;
  for (size_t i = 0; i < count && at < end; ++i) {
    const uint64_t size = sizes(i), first = std::max(begin, at), last = std::min(end, at + size);
    if (first < last) part(i, first - at, last - at, first - begin);
    at += size;
  }
}

}  // namespace

MemorySource::MemorySource(std::vector<MemoryPiece> pieces, std::shared_ptr<void> owner)
    : pieces_(std::move(pieces)), owner_(std::move(owner)) {
  for (const MemoryPiece& piece : pieces_) bytes_ += piece.bytes;
}

void MemorySource::each(Staging&, const TakePiece& take) const {
  for (const MemoryPiece& piece : pieces_) take(piece.data, piece.bytes);
}

void MemorySource::copy_range(char* to, uint64_t begin, uint64_t end) const {
  in_common([this](size_t i) { return pieces_[i].bytes; }, pieces_.size(), begin, end,
            [&](size_t i, uint64_t first, uint64_t last, uint64_t at) {
              std::memcpy(to + at, pieces_[i].data + first, last - first);
            });
}

JoinedSource::JoinedSource(std::vector<SourcePtr> parts) : parts_(std::move(parts)) {
  for (const SourcePtr& part : parts_) bytes_ += part->bytes();
}

bool JoinedSource::in_place() const {
  return all_of(parts_, [](const SourcePtr& part) { return part->in_place(); });
}

bool JoinedSource::on_device() const {
  return any_of(parts_, [](const SourcePtr& part) { return part->on_device(); });
}

void JoinedSource::each(Staging& staging, const TakePiece& take) const {
  for (const SourcePtr& part : parts_) part->each(staging, take);
}

void JoinedSource::copy_range(char* to, uint64_t begin, uint64_t end) const {
  in_common([this](size_t i) { return parts_[i]->bytes(); }, parts_.size(), begin, end,
            [&](size_t i, uint64_t first, uint64_t last, uint64_t at) { parts_[i]->copy_range(to + at, first, last); });
}

SlicedSource::SlicedSource(SourcePtr source, uint64_t begin, uint64_t end)
    : source_(std::move(source)), begin_(begin), end_(end) {
  if (begin > end || end > source_->bytes()) {
    fail(ErrorKind::kValue, "bytes ", begin, " to ", end, " of a source of ", source_->bytes());
  }
}

void SlicedSource::each(Staging& staging, const TakePiece& take) const {
  uint64_t at = 0;
  source_->each(staging, [&](const void* data, uint64_t bytes) {
    const uint64_t first = std::max(begin_, at), last = std::min(end_, at + bytes);
    if (first < last) take(static_cast<const char*>(data) + (first - at), last - first);
    at += bytes;
  });
}

void SlicedSource::copy_range(char* to, uint64_t begin, uint64_t end) const {
  source_->copy_range(to, begin_ + begin, begin_ + end);
}

}  // namespace ds::io

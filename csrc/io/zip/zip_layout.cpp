#include "io/zip/zip_layout.h"

#include <algorithm>
#include <unordered_set>

#include "base/error.h"

namespace ds::io {
namespace {

constexpr uint64_t kMax32 = 0xffffffff;
constexpr uint32_t kZip64Version = 45, kPlainVersion = 20;
constexpr uint32_t kUtf8 = 0x0800, kHasDescriptor = 0x0008;
constexpr uint32_t kFirstDay = 0x0021;  // 1980-01-01: equal states give equal files
constexpr size_t kLocalBytes = 30, kCentralBytes = 46, kZip64SizesBytes = 20, kFieldHeadBytes = 4;

// Little-endian numbers, one after the other.
class Bytes {
 public:
  Bytes& u16(uint64_t value) { return put(value, 2); }
  Bytes& u32(uint64_t value) { return put(value, 4); }
  Bytes& u64(uint64_t value) { return put(value, 8); }
  Bytes& text(const std::string& value) {
    text_ += value;
    return *this;
  }
  std::string take() { return std::move(text_); }
  size_t size() const { return text_.size(); }

 private:
  Bytes& put(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) text_ += static_cast<char>(value >> (8 * i));
    return *this;
  }
  std::string text_;
};

bool is_large(const ZipEntry& entry) { return entry.bytes >= kMax32; }
uint32_t flags_of(const ZipEntry& entry) { return kUtf8 | (entry.bytes > 0 ? kHasDescriptor : 0); }
uint32_t version_of(const ZipEntry& entry) { return is_large(entry) ? kZip64Version : kPlainVersion; }
uint64_t descriptor_bytes(const ZipEntry& entry) { return entry.bytes == 0 ? 0 : is_large(entry) ? 24 : 16; }

uint64_t fixed_header_bytes(const ZipEntry& entry) {
  return kLocalBytes + entry.name.size() + (is_large(entry) ? kZip64SizesBytes : 0) + kFieldHeadBytes;
}

std::string central_header(const ZipEntry& entry, uint64_t offset, uint32_t crc32) {
  Bytes wide;
  if (is_large(entry)) wide.u64(entry.bytes).u64(entry.bytes);
  if (offset >= kMax32) wide.u64(offset);
  Bytes extra;
  if (wide.size() > 0) {
    extra.u16(1).u16(wide.size());
    extra.text(wide.take());
  }
  const uint32_t version = extra.size() > 0 ? kZip64Version : kPlainVersion;
  Bytes out;
  out.text("PK\x01\x02").u16(version).u16(version).u16(flags_of(entry)).u16(0).u16(0).u16(kFirstDay).u32(crc32);
  out.u32(std::min(entry.bytes, kMax32)).u32(std::min(entry.bytes, kMax32)).u16(entry.name.size()).u16(extra.size());
  out.u16(0).u16(0).u16(0).u32(0).u32(std::min(offset, kMax32)).text(entry.name).text(extra.take());
  return out.take();
}

}  // namespace

ZipLayout::ZipLayout(std::vector<ZipEntry> entries) : entries_(std::move(entries)) {
  std::unordered_set<std::string> names;
  uint64_t at = 0;
  uint64_t directory_bytes = 0;
  for (const ZipEntry& entry : entries_) {
    if (entry.name.empty() || entry.name.size() > 0xffff) {
      fail(ErrorKind::kValue, "a name in a zip file has 1 to 65535 bytes, got ", entry.name.size());
    }
    if (!names.insert(entry.name).second) fail(ErrorKind::kValue, "two entries of a zip file are called ", entry.name);
    header_offsets_.push_back(at);
    const uint64_t data = (at + fixed_header_bytes(entry) + kAlignment - 1) / kAlignment * kAlignment;
    data_offsets_.push_back(data);
    const uint64_t wide = (is_large(entry) ? 16u : 0u) + (at >= kMax32 ? 8u : 0u);
    directory_bytes += kCentralBytes + entry.name.size() + (wide ? kFieldHeadBytes + wide : 0);
    at = data + entry.bytes + descriptor_bytes(entry);
  }
  directory_offset_ = at;
  file_bytes_ = at + directory_bytes + 56 + 20 + 22;
}

std::string ZipLayout::local_header(size_t index) const {
  const ZipEntry& entry = entries_[index];
  const uint64_t padding = data_offsets_[index] - header_offsets_[index] - fixed_header_bytes(entry);
  const uint64_t extra = (is_large(entry) ? kZip64SizesBytes : 0) + kFieldHeadBytes + padding;
  const uint64_t size = is_large(entry) ? kMax32 : 0;  // the descriptor has it
  Bytes out;
  out.text("PK\x03\x04").u16(version_of(entry)).u16(flags_of(entry)).u16(0).u16(0).u16(kFirstDay).u32(0);
  out.u32(size).u32(size).u16(entry.name.size()).u16(extra).text(entry.name);
  if (is_large(entry)) out.u16(1).u16(16).u64(entry.bytes).u64(entry.bytes);
  out.text("FB").u16(padding).text(std::string(padding, 'Z'));
  return out.take();
}

std::string ZipLayout::descriptor(size_t index, uint32_t crc32) const {
  const ZipEntry& entry = entries_[index];
  Bytes out;
  if (entry.bytes == 0) return out.take();
  out.text("PK\x07\x08").u32(crc32);
  if (is_large(entry))
    out.u64(entry.bytes).u64(entry.bytes);
  else
    out.u32(entry.bytes).u32(entry.bytes);
  return out.take();
}

std::string ZipLayout::directory(const std::vector<uint32_t>& crc32) const {
  Bytes out;
  for (size_t i = 0; i < entries_.size(); ++i) out.text(central_header(entries_[i], header_offsets_[i], crc32[i]));
  const uint64_t bytes = out.size();
  const uint64_t count = entries_.size();
  const uint64_t end = directory_offset_ + bytes;
  out.text("PK\x06\x06").u64(44).u16(kZip64Version).u16(kZip64Version).u32(0).u32(0).u64(count).u64(count);
  out.u64(bytes).u64(directory_offset_);
  out.text(std::string("PK\x06\x07", 4)).u32(0).u64(end).u32(1);
  const uint64_t few = std::min<uint64_t>(count, 0xffff);
  out.text("PK\x05\x06").u16(0).u16(0).u16(few).u16(few);
  out.u32(std::min(bytes, kMax32)).u32(std::min(directory_offset_, kMax32)).u16(0);
  return out.take();
}

}  // namespace ds::io

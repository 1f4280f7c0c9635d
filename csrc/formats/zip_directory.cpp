#include "formats/zip_directory.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>

#include "base/ranges.h"
#include "formats/format_error.h"
#include "formats/text_forms.h"
#include "io/crc32.h"

namespace ds::formats {
namespace {

constexpr uint64_t kEnd = 22, kEnd64 = 56, kLocator64 = 20, kCentral = 46, kLocal = 30;
constexpr uint16_t kStored = 0, kDeflated = 8;
constexpr uint64_t kFull = 0xFFFFFFFF;
constexpr uint64_t kDeflateLimit = 1032;  // no deflate stream grows by more (RFC 1951: 258 bytes for 2 bits)
constexpr uint64_t kPart = 1 << 18;

template <typename T>
T little(const std::string& bytes, uint64_t at) {
  uint64_t value = 0;
  for (size_t i = sizeof(T); i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[at + i]);
  return static_cast<T>(value);
}

template <typename... What>
[[noreturn]] void bad_zip(const CheckedFile& file, const What&... what) {
  damaged<DamagedZip>(file.path(), ": ", what...);
}

std::string part_of(const CheckedFile& file, uint64_t offset, uint64_t size, const std::string& what) {
  if (offset > file.bytes() || size > file.bytes() - offset) bad_zip(file, what, " lies outside of the file");
  return file.text(offset, size);
}

bool leaves_the_archive(const std::string& name) {
  if (name.empty()) return false;
  if (name[0] == '/' || name.find('\\') != std::string::npos || name.find('\0') != std::string::npos) return true;
  return ("/" + name + "/").find("/../") != std::string::npos;
}

struct End {
  uint64_t count, size, offset, end;  // end: what the directory must not reach
};

End find_end(const CheckedFile& file) {
  if (file.bytes() < kEnd) bad_zip(file, "too short for a zip file");
  const uint64_t tail_size = std::min(file.bytes(), kEnd + 65535);
  const std::string tail = part_of(file, file.bytes() - tail_size, tail_size, "the end of the directory");
  const size_t at = tail.rfind("PK\x05\x06", tail.size() - kEnd);
  if (at == std::string::npos) bad_zip(file, "no directory at its end: it is cut off or no zip file");
  uint64_t disk = little<uint16_t>(tail, at + 4), first_disk = little<uint16_t>(tail, at + 6);
  End found{little<uint16_t>(tail, at + 10), little<uint32_t>(tail, at + 12), little<uint32_t>(tail, at + 16),
            file.bytes() - tail_size + at};
  if (found.count == 0xFFFF || disk == 0xFFFF || first_disk == 0xFFFF || found.size == kFull || found.offset == kFull) {
    if (found.end < kLocator64) bad_zip(file, "the zip64 locator lies outside of the file");
    const std::string locator = part_of(file, found.end - kLocator64, kLocator64, "the zip64 locator");
    if (locator.compare(0, 4, "PK\x06\x07") != 0) bad_zip(file, "the zip64 locator is missing");
    const uint64_t end64 = little<uint64_t>(locator, 8);
    const std::string record = part_of(file, end64, kEnd64, "the zip64 end of the directory");
    if (record.compare(0, 4, "PK\x06\x06") != 0 || end64 + kEnd64 > found.end) {
      bad_zip(file, "the zip64 end of the directory is damaged");
    }
    disk = little<uint32_t>(record, 16);
    first_disk = little<uint32_t>(record, 20);
    found = {little<uint64_t>(record, 32), little<uint64_t>(record, 40), little<uint64_t>(record, 48), end64};
  }
  if (disk != 0 || first_disk != 0) bad_zip(file, "a part of an archive of several files");
  if (found.offset > found.end || found.size > found.end - found.offset || found.count > found.size / kCentral) {
    bad_zip(file, "the directory lies outside of the file");
  }
  return found;
}

// The 64-bit values that replace those which are full, in their order.
void take_wide(const CheckedFile& file, const std::string& extra, std::initializer_list<uint64_t*> values) {
  const bool full = any_of(values, [](const uint64_t* value) { return *value == kFull; });
  for (size_t at = 0; full && at + 4 <= extra.size();) {
    const uint16_t kind = little<uint16_t>(extra, at), length = little<uint16_t>(extra, at + 2);
    size_t body = at + 4;
    const size_t end = std::min<size_t>(extra.size(), body + length);
    at = body + length;
    if (kind != 1) continue;
    for (uint64_t* value : values) {
      if (*value != kFull) continue;
      if (body + 8 > end) bad_zip(file, "a zip64 record is cut off");
      *value = little<uint64_t>(extra, body);
      body += 8;
    }
    return;
  }
}

}  // namespace

ZipDirectory::ZipDirectory(const CheckedFile& file) : file_(file) {
  const End end = find_end(file);
  read_entries(part_of(file, end.offset, end.size, "the directory"), end.count, end.offset);
}

void ZipDirectory::read_entries(const std::string& directory, uint64_t count, uint64_t directory_offset) {
  uint64_t at = 0;
  names_.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    if (at + kCentral > directory.size()) bad_zip(file_, "the directory has fewer records than it says");
    const uint16_t flags = little<uint16_t>(directory, at + 8), method = little<uint16_t>(directory, at + 10);
    Entry entry{method == kDeflated,
                little<uint32_t>(directory, at + 42),
                little<uint32_t>(directory, at + 20),
                little<uint32_t>(directory, at + 24),
                0,
                little<uint32_t>(directory, at + 16)};
    const uint64_t name_size = little<uint16_t>(directory, at + 28), extra_size = little<uint16_t>(directory, at + 30),
                   comment_size = little<uint16_t>(directory, at + 32);
    const bool whole = directory.compare(at, 4, "PK\x01\x02") == 0;
    at += kCentral;
    if (!whole || name_size + extra_size + comment_size > directory.size() - at)
      bad_zip(file_, "the directory is damaged");
    const std::string name = directory.substr(at, name_size);
    take_wide(file_, directory.substr(at + name_size, extra_size), {&entry.bytes, &entry.stored, &entry.header});
    at += name_size + extra_size + comment_size;
    if (!is_utf8(name, false)) bad_zip(file_, "the name of a record is not text");
    if (leaves_the_archive(name)) bad_zip(file_, "the record '", name, "' would lie outside of the archive");
    if (entries_.count(name) != 0) bad_zip(file_, "the record '", name, "' appears twice");
    if ((flags & 0x41) != 0) bad_zip(file_, "the record '", name, "' is encrypted");
    if (method != kStored && method != kDeflated) {
      bad_zip(file_, "the record '", name, "' is packed in an unknown way (", method, ")");
    }
    if (method == kStored && entry.bytes != entry.stored) {
      bad_zip(file_, "the record '", name, "' has two different sizes, ", entry.stored, " and ", entry.bytes);
    }
    if (entry.bytes / kDeflateLimit > entry.stored) {
      bad_zip(file_, "the record '", name, "' says ", entry.bytes, " bytes, more than ", entry.stored,
              " packed ones can hold");
    }
    entries_.emplace(name, entry);
    names_.push_back(name);
  }
  check_offsets(directory_offset);
}

void ZipDirectory::check_offsets(uint64_t directory_offset) {
  std::vector<const std::string*> order;
  order.reserve(names_.size());
  for (const std::string& name : names_) order.push_back(&name);
  sort(order,
       [this](const std::string* a, const std::string* b) { return entries_.at(*a).header < entries_.at(*b).header; });
  uint64_t last_end = 0;
  const std::string* last = nullptr;
  for (const std::string* name : order) {
    const Entry& entry = entries_.at(*name);
    if (entry.header < last_end) bad_zip(file_, "the records '", last ? *last : "", "' and '", *name, "' overlap");
    const uint64_t before = kLocal + name->size();
    if (entry.header > directory_offset || before > directory_offset - entry.header ||
        entry.stored > directory_offset - entry.header - before) {
      bad_zip(file_, "the record '", *name, "' lies outside of the file");
    }
    last_end = entry.header + before + entry.stored;
    last = name;
  }
  uint64_t following = directory_offset;
  for (auto name = order.rbegin(); name != order.rend(); ++name) {
    Entry& entry = entries_.at(**name);
    entry.limit = following;
    following = entry.header;
  }
}

ZipRecord ZipDirectory::record(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) bad_zip(file_, "there is no record '", name, "'");
  const Entry& entry = found->second;
  const std::string what = "the record '" + name + "'";
  const std::string header = part_of(file_, entry.header, kLocal, what);
  const uint64_t name_size = little<uint16_t>(header, 26), extra_size = little<uint16_t>(header, 28);
  if (header.compare(0, 4, "PK\x03\x04") != 0 || part_of(file_, entry.header + kLocal, name_size, what) != name) {
    bad_zip(file_, what, " is not where the directory says");
  }
  const uint64_t offset = entry.header + kLocal + name_size + extra_size;
  if (offset > entry.limit || entry.stored > entry.limit - offset) bad_zip(file_, what, " runs into the next one");
  return {offset, entry.bytes, entry.stored, entry.crc32, entry.packed};
}

void ZipDirectory::unpack(const std::string& name, uint64_t start, uint64_t count, void* to) const {
  const ZipRecord found = record(name);
  z_stream stream{};
  if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) bad_zip(file_, "no memory to unpack the record '", name, "'");
  struct Closer {
    z_stream* stream;
    ~Closer() { inflateEnd(stream); }
  } closer{&stream};
  std::string packed, part(kPart, '\0');
  uint64_t read = 0, made = 0;
  uint32_t crc32 = 0;
  int status = Z_OK;
  while (made < found.bytes && made < start + count) {
    if (stream.avail_in == 0 && read < found.stored) {
      packed = file_.text(found.offset + read, std::min(kPart, found.stored - read));
      read += packed.size();
      stream.next_in = reinterpret_cast<Bytef*>(packed.data());
      stream.avail_in = static_cast<uInt>(packed.size());
    }
    stream.next_out = reinterpret_cast<Bytef*>(part.data());
    stream.avail_out = static_cast<uInt>(std::min<uint64_t>(kPart, found.bytes - made));
    const uInt room = stream.avail_out;
    status = inflate(&stream, Z_NO_FLUSH);
    if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR) {
      bad_zip(file_, "the record '", name, "' is damaged (", stream.msg ? stream.msg : "no deflate stream", ")");
    }
    const uint64_t got = room - stream.avail_out;
    crc32 = io::crc32_of(part.data(), got, crc32);
    const uint64_t first = std::max(made, start), last = std::min(made + got, start + count);
    if (first < last) std::memcpy(static_cast<char*>(to) + (first - start), part.data() + (first - made), last - first);
    made += got;
    const bool more = stream.avail_in > 0 || read < found.stored;
    if (made < found.bytes && (status == Z_STREAM_END || (got == 0 && !more))) {
      bad_zip(file_, "the record '", name, "' ends too early");
    }
  }
  if (start > found.bytes || count > found.bytes - start) bad_zip(file_, "the record '", name, "' ends too early");
  if (made == found.bytes && crc32 != found.crc32)
    bad_zip(file_, "the record '", name, "' is damaged (another CRC-32)");
}

}  // namespace ds::formats

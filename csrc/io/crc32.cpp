#include "io/crc32.h"

#include <string.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>

#include "io/crc32_fold.h"

namespace ds::io {

uint32_t crc32_of(const void* data, size_t bytes, uint32_t before) {
  if (bytes == 0) return before;  // zlib takes a null pointer for a question
  if (bytes >= kFoldFrom && can_fold_crc32()) return fold_crc32(data, bytes, before);
  return static_cast<uint32_t>(::crc32_z(before, static_cast<const Bytef*>(data), bytes));
}

uint32_t crc32_joined(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return static_cast<uint32_t>(::crc32_combine(first, second, static_cast<z_off_t>(second_bytes)));
}

uint32_t copy_with_crc32(char* to, const char* from, size_t bytes) {
  constexpr size_t kPart = 64 << 10;  // stays in the nearest caches between the copy and the sum
  uint32_t sum = 0;
  for (size_t done = 0; done < bytes; done += kPart) {
    const size_t now = std::min(kPart, bytes - done);
    memcpy(to + done, from + done, now);
    sum = crc32_of(to + done, now, sum);
  }
  return sum;
}

uint32_t stream_with_crc32(char* to, const char* from, size_t bytes) {
  if (!can_fold_crc32()) return copy_with_crc32(to, from, bytes);
  const size_t head = std::min(bytes, (kFoldAlign - reinterpret_cast<uintptr_t>(to) % kFoldAlign) % kFoldAlign);
  const size_t body = bytes - head >= kFoldFrom ? bytes - head : 0;
  uint32_t sum = copy_with_crc32(to, from, bytes - body);
  if (body > 0) sum = fold_and_stream_crc32(to + head, from + head, body, sum);
  return sum;
}

}  // namespace ds::io

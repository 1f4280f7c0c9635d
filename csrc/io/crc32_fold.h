// CRC-32 by carry-less multiplication: some times as fast as by tables, so that summing costs less than copying.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ds::io {

// Fewer bytes are no work for it.
constexpr size_t kFoldFrom = 128;

// Whether this processor has the instruction.
bool can_fold_crc32();

// As crc32_of, for `bytes` >= kFoldFrom, where can_fold_crc32().
uint32_t fold_crc32(const void* data, size_t bytes, uint32_t before);

// The same, of what is copied to `to`, past the caches. `to` is a multiple of kFoldAlign.
constexpr size_t kFoldAlign = 64;
uint32_t fold_and_stream_crc32(char* to, const char* from, size_t bytes, uint32_t before);

}  // namespace ds::io

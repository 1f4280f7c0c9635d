// CRC-32 as zip, gzip and PNG use it (zlib's).
#pragma once
#include <cstddef>
#include <cstdint>

namespace ds::io {

// Returns the checksum of `bytes` bytes at `data`, going on from `before` (0: the start).
uint32_t crc32_of(const void* data, size_t bytes, uint32_t before = 0);

// Returns the checksum of two stretches one after the other; the second has `second_bytes` bytes.
uint32_t crc32_joined(uint32_t first, uint32_t second, uint64_t second_bytes);

// Copies and sums in one pass: the sum is of what arrived at `to`, so it holds even if `from` changes meanwhile.
uint32_t copy_with_crc32(char* to, const char* from, size_t bytes);

// The same for memory that nobody reads soon: past the caches, which are left to others.
uint32_t stream_with_crc32(char* to, const char* from, size_t bytes);

}  // namespace ds::io

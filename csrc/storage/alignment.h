// Copies of blocks begin and end where O_DIRECT can transfer them.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "io/memory/aligned_pool.h"

namespace ds::storage {

constexpr auto kAlignment = static_cast<int64_t>(io::kBlockBytes);

inline int64_t whole_blocks(int64_t bytes) {
  return static_cast<int64_t>(io::round_up(static_cast<size_t>(bytes), io::kBlockBytes));
}

// The size of memory that has room for that many aligned bytes at any address.
inline int64_t copy_bytes(int64_t bytes) { return whole_blocks(bytes) + kAlignment; }

// Returns the offset of the first aligned byte in `memory`.
inline int64_t aligned_offset(const at::Tensor& memory) {
  const auto start = reinterpret_cast<uintptr_t>(memory.data_ptr());
  return static_cast<int64_t>(io::round_up(start, io::kBlockBytes) - start);
}

}  // namespace ds::storage

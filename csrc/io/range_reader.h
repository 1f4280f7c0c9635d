// Sums many ranges of a file on a few threads and in bounded memory.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ds::io {

// A range of a file, and the memory that it is read into.
struct Range {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  void* to = nullptr;
};

constexpr uint64_t kToTheEnd = ~uint64_t{0};  // Range::bytes: whatever follows offset

// The CRC-32 of every range, `to` unused, through buffers of 1 MiB for each thread; large ranges are cut and joined.
// kToTheEnd is allowed. Throws FileError; ErrorKind::kRuntime naming the range when the file is shorter.
std::vector<uint32_t> sum_ranges(const std::string& path, const std::vector<Range>& ranges, int threads);

}  // namespace ds::io

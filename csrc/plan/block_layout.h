// Layouts of blocks as lists: the blocks of keys that each block of queries sees (kernels/attention.h). Integers only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ds::plan {

// Row r of head h has the numbers list[start[h * (rows + 1) + r]] to list[start[h * (rows + 1) + r + 1] - 1],
// ascending.
struct BlockLists {
  std::vector<int32_t> start, list;
};

class BlockLayout {
 public:
  // seen[(h * rows + r) * columns + c] is not 0: block r of the queries of head h sees block c of the keys. Heads that
  // are all alike become one. Throws ErrorKind::kValue for a layout without heads or blocks, and for one with more
  // blocks than an int32 counts.
  BlockLayout(const uint8_t* seen, int64_t heads, int64_t rows, int64_t columns);

  int64_t heads() const { return heads_; }  // 1: all heads are alike
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  // The number of pairs of blocks, summed over heads().
  int64_t pairs() const { return static_cast<int64_t>(keys_.list.size()); }
  const BlockLists& keys() const { return keys_; }        // of each block of queries
  const BlockLists& readers() const { return readers_; }  // of each block of keys

 private:
  const int64_t rows_, columns_;
  int64_t heads_;
  BlockLists keys_, readers_;
};

}  // namespace ds::plan

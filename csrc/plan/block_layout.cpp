#include "plan/block_layout.h"

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace ds::plan {

namespace {

bool heads_alike(const uint8_t* seen, int64_t heads, int64_t numel) {
  for (int64_t i = numel; i < heads * numel; ++i)
    if ((seen[i] != 0) != (seen[i % numel] != 0)) return false;
  return true;
}

// `sees(head, row, column)`.
template <typename Sees>
BlockLists lists_of(int64_t heads, int64_t rows, int64_t columns, const Sees& sees) {
  BlockLists made;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t r = 0; r <= rows; ++r) {
      made.start.push_back(static_cast<int32_t>(made.list.size()));
      for (int64_t c = 0; r < rows && c < columns; ++c)
        if (sees(h, r, c)) made.list.push_back(static_cast<int32_t>(c));
    }
  }
  return made;
}

}  // namespace

BlockLayout::BlockLayout(const uint8_t* seen, int64_t heads, int64_t rows, int64_t columns)
    : rows_(rows), columns_(columns), heads_(heads) {
  if (heads < 1 || rows < 1 || columns < 1)
    fail(ErrorKind::kValue, "a layout of blocks is [heads, blocks of queries, blocks of keys], of each at least one; ",
         "got [", heads, ", ", rows, ", ", columns, "]");
  if (heads_alike(seen, heads, rows * columns)) heads_ = 1;
  if (heads_ * rows > std::numeric_limits<int32_t>::max() / columns)
    fail(ErrorKind::kValue, "a layout of ", heads_, " heads with ", rows, " x ", columns,
         " blocks has more than 2^31 blocks: choose larger ones");
  const auto at = [&](int64_t h, int64_t r, int64_t c) { return seen[(h * rows + r) * columns + c] != 0; };
  keys_ = lists_of(heads_, rows, columns, at);
  readers_ = lists_of(heads_, columns, rows, [&](int64_t h, int64_t c, int64_t r) { return at(h, r, c); });
}

}  // namespace ds::plan

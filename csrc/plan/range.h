// A run of consecutive elements.
#pragma once
#include <cstdint>

namespace ds::plan {

struct Range {
  int64_t begin = 0, end = 0;  // [begin, end)
  int64_t numel() const { return end - begin; }
};

}  // namespace ds::plan

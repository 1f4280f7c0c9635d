// The sum of squares of the values of one segment, as a plain loop.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels/sum_order.h"

namespace ds::kernels::ref {

// [Note: order of the sum of squares] in kernels/sum_order.h, for one segment.
inline double sum_squares_of(const std::vector<float>& values) {
  double block_lanes[kSumBlockLanes] = {};
  for (size_t begin = 0, block = 0; begin < values.size(); begin += kSumBlock, ++block) {
    double lanes[kSumLanes] = {};
    for (size_t i = begin; i < std::min(values.size(), begin + kSumBlock); ++i)
      lanes[(i - begin) % kSumLanes] += static_cast<double>(values[i]) * values[i];
    block_lanes[block % kSumBlockLanes] += sum_of_lanes(lanes);
  }
  return sum_of_lanes(block_lanes);
}

}  // namespace ds::kernels::ref

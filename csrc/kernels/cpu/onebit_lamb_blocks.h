// The arguments of 1-bit LAMB's range bodies instead of plain constants. Includes nothing that generates code: it is
// seen by every instruction set's compilation ([Note: dispatch] in targets.h).
#pragma once
#include <cstddef>

#include "kernels/onebit_lamb.h"
#include "kernels/sum_order.h"

namespace ds::kernels {

// The argument of onebit_lamb_moments points to this, and that of onebit_lamb_size. One block of the sums, which its
// tiles of at most kTile elements go on adding to.
struct OneBitLambBlock {
  static constexpr size_t kTile = 1024;
  const OneBitLambConstants* constants = nullptr;
  float scaling = 1;
  float largest = 0;
  double direction_lanes[kSumLanes] = {}, update_lanes[kSumLanes] = {};
  float direction[kTile], update[kTile];  // of a tile
};

// The argument of onebit_lamb_send and onebit_lamb: a number of the segment.
struct OneBitLambNumber {
  const OneBitLambConstants* constants;
  float number;  // the scaling, or the rate times the ratio
};

}  // namespace ds::kernels

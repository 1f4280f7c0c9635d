// The arguments of LAMB's range bodies instead of plain constants. Includes nothing that generates code: it is seen by
// every instruction set's compilation ([Note: dispatch] in targets.h).
#pragma once
#include <cstddef>

#include "kernels/lamb.h"
#include "kernels/sum_order.h"

namespace ds::kernels {

// The argument of lamb_moments points to this. One block of a sum, which its tiles of at most kTile elements go on
// adding to.
struct LambBlock {
  static constexpr size_t kTile = 1024;
  const LambConstants* constants = nullptr;
  double master_lanes[kSumLanes] = {}, update_lanes[kSumLanes] = {};
  float update[kTile];  // the direction u of a tile
};

// The argument of lamb.
struct LambRate {
  const LambConstants* constants;
  float rate;  // the constants' rate * ratio of the segment
};

}  // namespace ds::kernels

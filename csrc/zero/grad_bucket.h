// The gradients that travel together.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "zero/param_store.h"

namespace ds::zero {

struct GradBucket {
  int32_t space;
  plan::Bucket plan;
  int64_t begin, numel;  // in the full space
  std::vector<int32_t> params;
  bool in_place;                                    // as its space
  bool eager;                                       // leaves before backward's end even where nothing overlaps
  bool by_rows;                                     // one parameter, of which only touched rows travel
  std::vector<std::pair<int64_t, int64_t>> gaps{};  // padding, as [begin, end) within the bucket

  // Of one backward.
  int32_t pending = -1;  // parameters still expected to fire; -1: unknown, leaves at the end
  bool launched = false;
  bool arrived = false;   // its row is complete, and somebody has been told
  at::Tensor before{};    // what that row held of earlier backwards
  bool reduced = false;   // the row of reduced gradients holds something
  bool left = false;      // the row is on its way to where it rests, or there; it counts when the backward has ended
  at::Tensor slots{};     // `numel` elements
  at::Tensor wire{};      // what travels when it is not the slots themselves
  at::Tensor received{};  // this rank's row of the sum
  comm::WorkPtr work{};

  void zero_gaps() const;  // in `slots`: padding travels, too, and must not be garbage, which could be nan
};

// Of all spaces, in the order in which backward completes them: from the module's last parameters to its first.
std::vector<GradBucket> grad_buckets(const ParamStore& store);

}  // namespace ds::zero

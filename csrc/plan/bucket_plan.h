// How gradients are grouped for reduction: contiguous runs of the flat space, formed from its end, because backward
// produces the last parameters first.
#pragma once
#include <cstdint>
#include <vector>

#include "plan/shard_map.h"

namespace ds::plan {

struct Bucket {
  int32_t first_param, last_param;  // inclusive, indices into the layout
  int64_t begin, end;               // flat elements [begin, end)
};

// Every element of the flat space belongs to exactly one bucket. A bucket holds at most `max_numel` elements unless
// a single parameter is larger: parameters are never split. Returned in the order in which they should be reduced.
std::vector<Bucket> bucket_plan(const FlatLayout& layout, int64_t max_numel);

}  // namespace ds::plan

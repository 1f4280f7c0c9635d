#include "plan/shard_map.h"

#include <algorithm>

#include "base/error.h"

namespace ds::plan {

namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

FlatLayout flat_layout(const std::vector<int64_t>& numels, int64_t align, int64_t parts) {
  if (align <= 0 || parts <= 0)
    fail(ErrorKind::kValue, "flat_layout: align ", align, " and parts ", parts, " must be positive");
  FlatLayout layout;
  layout.numels = numels;
  layout.offsets.reserve(numels.size());
  int64_t next = 0;
  for (int64_t numel : numels) {
    if (numel < 0) fail(ErrorKind::kValue, "flat_layout: a parameter has ", numel, " elements");
    layout.offsets.push_back(next);
    next = round_up(next + numel, align);
  }
  layout.total_numel = round_up(next, align * parts);
  return layout;
}

ShardMap slice_flat(const FlatLayout& layout, int64_t parts) {
  if (parts <= 0 || layout.total_numel % parts != 0)
    fail(ErrorKind::kValue, "slice_flat: ", layout.total_numel, " elements do not divide into ", parts, " parts");
  ShardMap map;
  map.shard_numel = layout.total_numel / parts;
  for (size_t param = 0; param < layout.numels.size(); ++param) {
    const int64_t begin = layout.offsets[param];
    const int64_t end = begin + layout.numels[param];
    for (int64_t at = begin; at < end;) {
      const int64_t rank = at / map.shard_numel;
      const int64_t stop = std::min(end, (rank + 1) * map.shard_numel);
      map.extents.push_back({static_cast<int32_t>(param), at - begin, stop - at, static_cast<int32_t>(rank),
                             at - rank * map.shard_numel});
      at = stop;
    }
  }
  // Offsets grow with the parameter, so the walk above already goes by rank and then by shard_offset.
  return map;
}

}  // namespace ds::plan

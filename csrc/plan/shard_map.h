// Which elements of which parameter live where: the one table that reducing, norms, stepping, offload and
// checkpoints walk. They never ask for the ZeRO stage; a stage is only another table.
#pragma once
#include <cstdint>
#include <vector>

namespace ds::plan {

// Parameters laid end to end in one flat index space, each start aligned. Counts are elements, not bytes.
struct FlatLayout {
  std::vector<int64_t> offsets;  // of each parameter
  std::vector<int64_t> numels;
  int64_t total_numel = 0;  // a multiple of the alignment and of the number of parts
};

// A run of consecutive elements of one parameter, owned by one rank.
struct Extent {
  int32_t param;         // index into FlatLayout
  int64_t param_offset;  // first element within the parameter
  int64_t numel;         // > 0
  int32_t rank;          // owner
  int64_t shard_offset;  // first element within the owner's shard
};

struct ShardMap {
  int64_t shard_numel = 0;      // elements of each rank's shard, padding included
  std::vector<Extent> extents;  // by rank, then by shard_offset
};

// `align` > 0 elements. A parameter without elements takes no room and gets no extent.
FlatLayout flat_layout(const std::vector<int64_t>& numels, int64_t align, int64_t parts);

// Slices the flat space into `parts` equal shards; a parameter may straddle ranks. parts == 1: one owner of all,
// which is how replicated states (stage 0) look.
ShardMap slice_flat(const FlatLayout& layout, int64_t parts);

}  // namespace ds::plan

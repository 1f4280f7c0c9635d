// The owner of each element of each parameter: the one table that reducing, norms, stepping, offload and
// checkpoints walk. They never ask for the ZeRO stage; a stage is only another table.
//
// Two index spaces. The *shard space* is what one rank owns: shard_numel elements on every rank. The *full space* is
// all shards, bucket by bucket: a bucket that takes L elements of the shard space takes parts * L elements of the full
// space, rank by rank. So a bucket of a full buffer is exactly the operand of a reduce-scatter or an all-gather, and
// its row number r is what rank r owns.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ds::plan {

// A run of consecutive elements of one parameter, owned by one rank.
struct Extent {
  int32_t param;         // index within the map
  int64_t param_offset;  // first element within the parameter
  int64_t numel;         // > 0
  int32_t rank;          // owner
  int64_t shard_offset;  // first element within the owner's shard
  int64_t full_offset;   // first element within the full space
};

// Parameters that are reduced (and, where replicated, gathered) together.
struct Bucket {
  int32_t first_param, last_param;  // inclusive
  int64_t shard_begin, shard_end;   // in the shard space
};

struct ShardMap {
  int64_t parts = 1;
  int64_t shard_numel = 0;         // padding included
  std::vector<int64_t> numels;     // of each parameter
  std::vector<int64_t> offsets;    // of each parameter in the full space, where it lies there in one piece; else -1
  std::vector<Extent> extents;     // by parameter, then by param_offset
  std::vector<std::size_t> first;  // extents of parameter p: [first[p], first[p + 1])
  std::vector<int32_t> bucket_of;  // of each parameter
  std::vector<Bucket> buckets;     // in the order in which they should be reduced: from the last parameters on

  int64_t full_numel() const { return parts * shard_numel; }
  int64_t full_begin(const Bucket& bucket) const { return parts * bucket.shard_begin; }
  int64_t full_end(const Bucket& bucket) const { return parts * bucket.shard_end; }
  // The position of element `shard_offset` of `rank`'s shard in the full space.
  int64_t full_offset(const Bucket& bucket, int64_t rank, int64_t shard_offset) const {
    return full_begin(bucket) + rank * (bucket.shard_end - bucket.shard_begin) + shard_offset - bucket.shard_begin;
  }
};

// Every parameter in one piece of the full space, each start aligned to `align` elements; a bucket is cut into `parts`
// equal rows, so a parameter may straddle ranks. parts == 1: one owner of everything, which is how replicas look. A
// bucket holds at most `max_numel` elements of the full space unless a single parameter is larger: parameters are
// never split over buckets. `alone`, where it is not empty: parameters that have a bucket of their own.
ShardMap flat_shards(const std::vector<int64_t>& numels, int64_t align, int64_t parts, int64_t max_numel,
                     const std::vector<bool>& alone = {});

// Every parameter cut into `parts` equal slices of ceil(numel / parts) elements, the last ones shorter or empty; each
// slice starts aligned in the shard space.
ShardMap param_shards(const std::vector<int64_t>& numels, int64_t align, int64_t parts, int64_t max_numel);

// Elements of a slice of param_shards.
int64_t slice_numel(int64_t numel, int64_t parts);

}  // namespace ds::plan

// From one cut of a row of elements into another: which runs every rank gives to which, and where they go.
//
// The row is the parameters of a group end to end. It is cut now into runs that ranks own, in any order, and shall be
// cut into `parts` equal partitions of `size` elements, partition r for rank r. What is sent to one rank lies together,
// in the order of the row: so the receiver knows where it goes without being told.
#pragma once
#include <cstdint>
#include <vector>

namespace ds::plan {

// `numel` elements of the row from `at` on; `rank` has them as its piece number `piece`, from `offset` in it on.
struct OwnedRun {
  int64_t at;
  int64_t numel;
  int32_t rank;
  int64_t piece;  // of interest to the owner only
  int64_t offset;
};

struct Give {
  int64_t piece, offset, numel;
};
struct Take {
  int64_t at, numel;  // `at` within the partition
};

struct Repartition {
  std::vector<Give> give;            // the runs that `rank` sends, peer by peer
  std::vector<Take> take;            // the runs that it receives, peer by peer
  std::vector<int64_t> give_numels;  // to each peer, itself included
  std::vector<int64_t> take_numels;  // from each peer
};

// `runs`: those of all ranks, by `at`; they do not overlap. Fails (ErrorKind::kValue) for a run that lies beyond the
// partitions.
Repartition repartition(const std::vector<OwnedRun>& runs, int64_t size, int32_t parts, int32_t rank);

}  // namespace ds::plan

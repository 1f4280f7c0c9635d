// Spreads sums over whole segments over a thread pool: block by block, in the order of kernels/sum_order.h.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels/cpu/split.h"
#include "kernels/sum_order.h"
#include "kernels/update.h"

namespace ds::kernels::cpu {

// Two sums of one block.
struct SumPair {
  double first, second;
};

// Adds the sums of a segment's blocks to sums[0] and sums[1]. Lanes that no block reaches are zero and would change
// nothing.
template <class Pair>
void add_pairs(const Pair* blocks, size_t count, double* sums) {
  if (count == 1) {
    sums[0] += blocks[0].first;
    sums[1] += blocks[0].second;
    return;
  }
  double first[kSumBlockLanes] = {}, second[kSumBlockLanes] = {};
  for (size_t b = 0; b < count; ++b) {
    first[b % kSumBlockLanes] += blocks[b].first;
    second[b % kSumBlockLanes] += blocks[b].second;
  }
  sums[0] += sum_of_lanes(first);
  sums[1] += sum_of_lanes(second);
}

// Calls block(s, begin, end) for all blocks of all segments, which returns a Sums, and then, one segment after the
// other, finish(s, blocks, number of blocks) for those that are not empty.
template <class Sums, typename Block, typename Finish>
void for_sum_blocks(const Launch& launch, const UpdateSegment* segments, size_t count, const Block& block,
                    const Finish& finish) {
  std::vector<size_t> ends(count);  // of each segment, in the row of all blocks
  size_t blocks = 0, total = 0;
  for (size_t s = 0; s < count; ++s) {
    ends[s] = blocks += sum_blocks(segments[s].numel);
    total += segments[s].numel;
  }
  std::vector<Sums> found(blocks);
  const auto run = [&](size_t begin, size_t end) {
    size_t s = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (size_t b = begin; b < end; ++b) {
      while (b >= ends[s]) ++s;
      const size_t first = (b - (s == 0 ? 0 : ends[s - 1])) * kSumBlock;
      found[b] = block(s, first, std::min(segments[s].numel, first + kSumBlock));
    }
  };
  if (launch.pool == nullptr || total <= kInline) {
    run(0, blocks);
  } else {
    launch.pool->parallel_for(blocks, 1, run);
  }
  for (size_t s = 0, begin = 0; s < count; begin = ends[s++])
    if (segments[s].numel != 0) finish(s, found.data() + begin, ends[s] - begin);
}

}  // namespace ds::kernels::cpu

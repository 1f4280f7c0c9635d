// Cutting a row of items into contiguous parts: pipeline stages out of layers, for example.
//
// A partition of n items into p parts is p + 1 offsets: part i is [offsets[i], offsets[i + 1]), offsets[0] = 0 and
// offsets[p] = n. Parts may be empty only where there are fewer items than parts: then the first n parts hold one each.
#pragma once
#include <cstdint>
#include <vector>

namespace ds::plan {

// Equal parts; the first ones hold one more where p does not divide n. p >= 1, n >= 0, else ErrorKind::kValue.
std::vector<int64_t> partition_uniform(int64_t items, int64_t parts);

// The heaviest part is as light as possible; among such partitions the sum of squared part weights is smallest, so the
// others are even too; among equal ones the earlier cut wins. Weights are >= 0 and finite, else ErrorKind::kValue.
// Time O(n^2 p), memory O(n p): made for layers, not for samples.
std::vector<int64_t> partition_balanced(const std::vector<double>& weights, int64_t parts);

}  // namespace ds::plan

// [Note: order of the sum of squares]
// Addition in fp64 is not associative, so the order is part of the contract: it must depend neither on the thread
// count nor on the vector width. Each segment is cut into blocks of kSumBlock elements; element i of a block adds its
// square to lane i % kSumLanes, in increasing i; the lanes of a block are added pairwise (sum_of_lanes); the blocks
// are added in order. A square of an fp32 (or shorter) number is exact in fp64, so a fused multiply-add changes
// nothing for them. 32 lanes are four AVX-512 registers: enough to hide the latency of the addition.
#pragma once
#include <cstddef>

namespace ds::kernels {

constexpr size_t kSumLanes = 32;
constexpr size_t kSumBlock = 16384;

inline double sum_of_lanes(double (&lanes)[kSumLanes]) {
  for (size_t width = kSumLanes / 2; width > 0; width /= 2)
    for (size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

}  // namespace ds::kernels

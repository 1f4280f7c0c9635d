// [Note: order of the sum of squares]
// Addition in fp64 is not associative, so the order is part of the contract: it must depend neither on the thread
// count nor on the vector width nor on the device. Each segment is cut into blocks of kSumBlock elements; element i
// of a block adds its square to lane i % kSumLanes, in increasing i; the lanes of a block are added pairwise. The
// block sums of all segments, in order, are added likewise: number b to lane b % kSumBlockLanes, then pairwise.
// A square of an fp32 (or shorter) number is exact in fp64, so a fused multiply-add changes nothing for them. 32 lanes
// are four AVX-512 registers, enough to hide the latency of the addition, and one warp; 1024 are one CUDA block.
#pragma once
#include <cstddef>

namespace ds::kernels {

constexpr size_t kSumLanes = 32;
constexpr size_t kSumBlock = 16384;
constexpr size_t kSumBlockLanes = 1024;

// Scratch that sum_squares, and passes with sums over whole parameters, take on CUDA for each block: at most two sums
// and a largest value.
constexpr size_t kSumScratchBytes = 3 * sizeof(double);

inline size_t sum_blocks(size_t numel) { return (numel + kSumBlock - 1) / kSumBlock; }

// Pairwise: lane i takes lane i + N/2, then i + N/4, and so on.
template <size_t N>
double sum_of_lanes(double (&lanes)[N]) {
  for (size_t width = N / 2; width > 0; width /= 2)
    for (size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

}  // namespace ds::kernels

// The memory bound beside which benchmarks put their figures: the same loads and stores as a kernel, and next to no
// arithmetic. Not for training.
#pragma once
#include "kernels/launch.h"

namespace ds::kernels {

// Reads one array, updates up to three in place and overwrites one, all of numel fp32 elements; a null array is left
// out (of the updates the last ones first). Adam is read {grad}, update {master, exp_avg, exp_avg_sq}: 4 loads and 3
// stores of 4 bytes per element.
struct Stream {
  const float* read = nullptr;
  float* update[3] = {nullptr, nullptr, nullptr};
  float* write = nullptr;
  size_t numel = 0;
};

}  // namespace ds::kernels

// update[k][i] = update[k][i] * 0.999 + read[i] and write[i] = read[i] for `count` of them, split over the pool as
// update kernels split their segments, with the widest vectors of this processor; returns the sum of what was read
// where nothing is written (so that the reading cannot be left out), else 0.
extern "C" __attribute__((visibility("default"))) float ds_cpu_stream(const ds::kernels::Launch&,
                                                                      const ds::kernels::Stream*, size_t count);

// The memory bound beside which benchmarks put their figures: the same loads and stores as a kernel, and next to no
// arithmetic. Not for training.
#pragma once
#include "kernels/launch.h"

namespace ds::kernels {

// Reads `reads` and updates `updates` arrays of n fp32 elements in place; a null array is left out. Adam is
// {grad}, {master, exp_avg, exp_avg_sq}: 4 loads and 3 stores of 4 bytes per element.
struct Stream {
  const float* read = nullptr;
  float* update[3] = {nullptr, nullptr, nullptr};
  size_t n = 0;
};

}  // namespace ds::kernels

// Each update[k][i] = update[k][i] * 0.999 + read[i], with the widest vectors of this processor.
extern "C" __attribute__((visibility("default"))) void ds_cpu_stream(const ds::kernels::Launch&,
                                                                     const ds::kernels::Stream&);

// The CPU's entries of the kernel table, one per instruction set in the order of ds::Isa. An entry whose instruction
// set was not built must not be called: cpu/table.cpp hands out no table with one.
#pragma once
#include "base/cpu_features.h"
#include "kernels/table.h"

namespace ds::kernels::cpu {

extern const decltype(KernelTable::copy) kCopy[kIsaCount];
extern const decltype(KernelTable::accumulate) kAccumulate[kIsaCount];
extern const decltype(KernelTable::sum_squares) kSumSquares[kIsaCount];
extern const decltype(KernelTable::update) kUpdate[kIsaCount];
extern const decltype(KernelTable::scale) kScale[kIsaCount];
extern const decltype(KernelTable::column_sums) kColumnSums[kIsaCount];

// Whether this build has bodies for `isa`.
bool built(Isa isa);

}  // namespace ds::kernels::cpu

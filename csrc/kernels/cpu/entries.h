// The CPU's entries of the kernel table, one per instruction set in the order of ds::Isa. An entry whose instruction
// set was not built must not be called: cpu/table.cpp hands out no table with one.
#pragma once
#include <cstring>

#include "base/cpu_features.h"
#include "kernels/table.h"

namespace ds::kernels::cpu {

extern const decltype(KernelTable::copy) kCopy[kIsaCount];
extern const decltype(KernelTable::accumulate) kAccumulate[kIsaCount];
extern const decltype(KernelTable::find_nonfinite) kFindNonfinite[kIsaCount];
extern const decltype(KernelTable::move_all) kMoveAll[kIsaCount];
extern const decltype(KernelTable::sum_squares) kSumSquares[kIsaCount];
extern const decltype(KernelTable::update) kUpdate[kIsaCount];
extern const decltype(KernelTable::scale) kScale[kIsaCount];
extern const decltype(KernelTable::column_sums) kColumnSums[kIsaCount];

// Whether this build has bodies for `isa`.
bool built(Isa isa);

// One kind of table: of the reference, and of each instruction set.
template <typename Table>
struct IsaTables {
  Table ref;
  Table by_isa[kIsaCount];

  // Null for an instruction set that this build or this machine does not have.
  const Table* find(const char* isa) const {
    if (std::strcmp(isa, "ref") == 0) return &ref;
    for (int i = 0; i < kIsaCount; ++i) {
      const auto one = static_cast<Isa>(i);
      if (std::strcmp(isa, isa_name(one)) == 0 && built(one) && cpu_has(one)) return &by_isa[i];
    }
    return nullptr;
  }
};

}  // namespace ds::kernels::cpu

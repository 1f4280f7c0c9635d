// The CPU's tables, one per instruction set, and the choice among them.
#include "kernels/table.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "base/cpu_features.h"
#include "base/error.h"
#include "kernels/cpu/entries.h"
#include "kernels/cpu/update.h"
#include "kernels/ref/ref.h"
#include "kernels/ref/update.h"

namespace ds::kernels::cpu {
namespace {

const char* no_error() { return nullptr; }

KernelTable ref_table() {
  KernelTable t = {};
  t.abi = kKernelAbi;
  t.size = sizeof(KernelTable);
  t.device = "cpu";
  t.isa = "ref";
  t.copy = &ref::copy;
  t.accumulate = &ref::accumulate;
  t.sum_squares = &ref::sum_squares;
  t.finish_norm = &ref::finish_norm;
  t.find_update = &find_update;
  t.update_name = &update_name;
  t.update = &ref::update;
  t.scale = &ref::scale;
  t.last_error = &no_error;
  t.device_error = &no_error;
  t.column_sums = &ref::column_sums;
  t.move_all = &ref::move_all;
  t.find_nonfinite = &ref::find_nonfinite;
  return t;
}

// Entries without vector code are those of the reference.
KernelTable isa_table(Isa isa) {
  const int i = static_cast<int>(isa);
  KernelTable t = ref_table();
  t.isa = isa_name(isa);
  t.copy = kCopy[i];
  t.accumulate = kAccumulate[i];
  t.sum_squares = kSumSquares[i];
  t.update = kUpdate[i];
  t.scale = kScale[i];
  t.column_sums = kColumnSums[i];
  t.move_all = kMoveAll[i];
  t.find_nonfinite = kFindNonfinite[i];
  return t;
}

// Everything there is, made once.
struct Tables {
  IsaTables<KernelTable> all = {ref_table(), {}};
  const KernelTable* chosen = nullptr;
  std::string error;  // why nothing is chosen

  Tables() {
    std::vector<Isa> built;
    for (int i = 0; i < kIsaCount; ++i) {
      all.by_isa[i] = isa_table(static_cast<Isa>(i));
      if (cpu::built(static_cast<Isa>(i))) built.push_back(static_cast<Isa>(i));
    }
    try {
      chosen = &all.by_isa[static_cast<int>(select_isa(built, std::getenv("DS_FORCE_ISA")))];
    } catch (const Error& e) {
      error = e.what();
    }
  }
};

const Tables& tables() {
  static const Tables all;
  return all;
}

}  // namespace
}  // namespace ds::kernels::cpu

using namespace ds::kernels;
using ds::kernels::cpu::tables;

const KernelTable* ds_cpu_kernels(uint32_t abi) { return abi == kKernelAbi ? tables().chosen : nullptr; }

const char* ds_cpu_kernels_error(uint32_t abi) {
  if (abi != kKernelAbi) {
    return "libds_kernels_cpu.so was built from another version of the kernel table than its caller: build both "
           "again from one source tree (`make`), or reinstall the package.";
  }
  return tables().chosen != nullptr ? nullptr : tables().error.c_str();
}

const KernelTable* ds_cpu_kernels_isa(uint32_t abi, const char* isa) {
  return abi == kKernelAbi ? tables().all.find(isa) : nullptr;
}

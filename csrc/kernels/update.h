// One step of an optimizer over many tensors: what every rule's kernel takes. Kernels register themselves by name
// (cpu/update.h, cuda/update.cuh) and are found with KernelTable::find_update, so a new rule edits no list.
//
// Arithmetic is fp32, each operation rounded once, no fused multiply-add: every instruction set and device gives the
// same bits. Weights and states that are not fp32 are widened, updated in fp32 and rounded back once per step.
#pragma once
#include <cstdint>

#include "kernels/launch.h"
#include "kernels/norm.h"

namespace ds::kernels {

constexpr int kMaxStates = 4;

// One run of consecutive elements of a parameter and its optimizer state.
struct UpdateSegment {
  void* master = nullptr;         // of UpdateArgs::master_dtype: the weights, updated in place
  void* states[kMaxStates] = {};  // of UpdateArgs::state_dtype, in the order of the rule's slots
  const void* grad = nullptr;     // of UpdateArgs::grad_dtype
  void* lp = nullptr;             // low-precision copy to write, of UpdateArgs::lp_dtype; null: none
  size_t numel = 0;
  float* scratch = nullptr;  // one fp32 number per element, for rules that say they need it; else null
  double* sums = nullptr;    // of the parameter, for rules with sums over whole parameters; else null
  uint64_t stream = 0;       // stochastic rounding: which stream of random numbers the segment draws from
};

struct UpdateArgs {
  DType grad_dtype = DType::kF32, lp_dtype = DType::kF32;
  DType master_dtype = DType::kF32, state_dtype = DType::kF32;
  const void* constants = nullptr;  // the rule's block of hyperparameters, in host memory
  // Round bf16 weights and states up or down at random, so that the expectation is exact ([Note: random rounding] in
  // random_rounding.h). `lp` is rounded to nearest all the same. Other dtypes are not affected.
  bool stochastic = false;
  uint64_t seed = 0;  // another one for each step
};

// A kernel that find_update found.
struct UpdateKernel {
  const char* name;
  int states;              // how many of UpdateSegment::states it reads and writes
  size_t constants_bytes;  // size of what UpdateArgs::constants points to
};

}  // namespace ds::kernels

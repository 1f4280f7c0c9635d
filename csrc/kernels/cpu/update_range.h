// The arguments of an update kernel's range body. Includes nothing that generates code: it is seen by every instruction
// set's compilation ([Note: dispatch] in targets.h).
#pragma once
#include <cstddef>

#include "base/dtype.h"

namespace ds::kernels {

struct UpdateRange {
  float* master;
  float* states[4];
  const void* grad;  // of grad_dtype, which is not fp64
  DType grad_dtype;
  void* lp;  // of lp_dtype, which is not fp64; null: none
  DType lp_dtype;
  size_t n;
  float grad_scale;
  float* scratch;
};

}  // namespace ds::kernels

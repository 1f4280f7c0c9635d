// fp16 and bf16 for the host's compiler: the conversions that the kernels use, which are those of the CPU's kernels.
#pragma once
#include "base/half.h"

struct __half {
  ds::Fp16 value;
};
inline float __half2float(__half x) { return ds::to_float(x.value); }
inline __half __float2half_rn(float x) { return {ds::to_fp16(x)}; }
struct __nv_bfloat16 {
  ds::Bf16 value;
};
inline float __bfloat162float(__nv_bfloat16 x) { return ds::to_float(x.value); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {ds::to_bf16(x)}; }

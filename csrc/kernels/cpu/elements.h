// One element of the narrow types, as fp32: for loops that are not written in vectors.
#pragma once
#include "base/dtype.h"
#include "base/half.h"

namespace ds::kernels::cpu {

inline float wide(float x) { return x; }
inline float wide(Fp16 x) { return to_float(x); }
inline float wide(Bf16 x) { return to_float(x); }
inline void put(float& to, float x) { to = x; }
inline void put(Fp16& to, float x) { to = to_fp16(x); }
inline void put(Bf16& to, float x) { to = to_bf16(x); }

// call(value of the type) for the type of `dtype`: kF32, kF16 or kBF16.
template <typename Call>
void with_element(DType dtype, const Call& call) {
  if (dtype == DType::kF32) return call(float{});
  dtype == DType::kF16 ? call(Fp16{}) : call(Bf16{});
}

}  // namespace ds::kernels::cpu

// One element of any dtype, read and written through a switch: what makes the reference loops plain.
#pragma once
#include "base/half.h"
#include "kernels/launch.h"

namespace ds::kernels::ref {

inline double load(const void* data, DType dtype, size_t i) {
  switch (dtype) {
    case DType::kF32: return static_cast<const float*>(data)[i];
    case DType::kF16: return to_float(static_cast<const Fp16*>(data)[i]);
    case DType::kBF16: return to_float(static_cast<const Bf16*>(data)[i]);
    case DType::kF64: return static_cast<const double*>(data)[i];
  }
  return 0;
}

inline void store(void* data, DType dtype, size_t i, double value) {
  switch (dtype) {
    case DType::kF32: static_cast<float*>(data)[i] = static_cast<float>(value); break;
    case DType::kF16: static_cast<Fp16*>(data)[i] = to_fp16(static_cast<float>(value)); break;
    case DType::kBF16: static_cast<Bf16*>(data)[i] = to_bf16(static_cast<float>(value)); break;
    case DType::kF64: static_cast<double*>(data)[i] = value; break;
  }
}

}  // namespace ds::kernels::ref

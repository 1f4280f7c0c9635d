// Element types that kernels and plans know. Values are part of the kernel libraries' ABI: append only.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ds {

enum class DType : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kF64 = 3 };

constexpr size_t dtype_bytes(DType t) { return t == DType::kF32 ? 4 : t == DType::kF64 ? 8 : 2; }

constexpr const char* dtype_name(DType t) {
  return t == DType::kF32 ? "fp32" : t == DType::kF16 ? "fp16" : t == DType::kBF16 ? "bf16" : "fp64";
}

}  // namespace ds

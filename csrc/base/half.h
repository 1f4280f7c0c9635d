// bf16 and fp16 as 16-bit patterns, and their conversions to and from fp32: round to nearest even, NaN stays NaN.
//
// These are the scalar definitions that every vector and CUDA body must equal bit for bit (NaN payloads aside).
#pragma once
#include <cstdint>
#include <cstring>

namespace ds {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline float to_float(Bf16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

inline Bf16 to_bf16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};  // quiet, keeps the sign
  // Adding half a unit (less one when the kept part is even) carries into the kept bits exactly when it should;
  // the carry out of the largest finite value is infinity, as IEEE rounding wants.
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

inline float to_float(Fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));  // inf, NaN
  if (magnitude >= 0x0400u) return bits_float(sign | ((magnitude << 13) + 0x38000000u));           // normal
  return bits_float(sign | float_bits(static_cast<float>(magnitude) * 0x1p-24f));                  // subnormal, exact
}

inline Fp16 to_fp16(float x) {
  const uint32_t u = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {
    // Below the smallest normal fp16 (2^-14): adding 0.5 leaves the fp16 subnormal in the low bits, rounded to
    // nearest even by the addition itself (the ulp of 0.5 is 2^-24, the fp16 subnormal step).
    const float shifted = bits_float(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | (rounded >> 13))};
}

}  // namespace ds

// The scale and the offset of one group of a BlockCode ([Note: blocks] in kernels/codes.h), for all devices.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels/codes.h"
#include "kernels/host_device.h"

namespace ds::kernels {

// The numbers with which the codes of a group are made and decoded. A NaN scale: the group comes back as NaN.
struct GroupScale {
  float scale, offset;
};

DS_HOST_DEVICE static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
DS_HOST_DEVICE static inline float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr uint32_t kAbsoluteBits = 0x7fffffffu, kInfinityBits = 0x7f800000u, kNanBits = 0x7fc00000u;

// The largest code.
DS_HOST_DEVICE static inline int top_code(const BlockCode& code) {
  return code.offset ? (1 << code.bits) - 1 : (1 << (code.bits - 1)) - 1;
}

// width / top in the type of scales, or the next number above it. width >= 0.
DS_HOST_DEVICE static inline float scale_of(const BlockCode& code, float width, int top) {
  float scale = width / static_cast<float>(top);
  uint32_t bits = bits_of(scale);
  // The product of an fp32 number and a code is exact in fp64.
  if (static_cast<double>(scale) * top < static_cast<double>(width)) ++bits;
  if (code.scale == DType::kBF16) bits = (bits + 0xffffu) & 0xffff0000u;
  return of_bits(bits);
}

// `most`: the largest absolute value, of which no element is NaN.
DS_HOST_DEVICE static inline GroupScale symmetric_scale(const BlockCode& code, float most) {
  const int top = top_code(code);
  const float scale = scale_of(code, most, top);
  const bool finite = (bits_of(scale * static_cast<float>(top)) & kAbsoluteBits) < kInfinityBits;
  return {finite ? scale : of_bits(kNanBits), 0.0f};
}

// `least`, `most`: the smallest and the largest value.
DS_HOST_DEVICE static inline GroupScale offset_scale(const BlockCode& code, float least, float most) {
  const int top = top_code(code);
  uint32_t bits = bits_of(least + 0.0f);  // 0, not -0
  if (code.scale == DType::kBF16) bits = ((bits >> 31) != 0 ? bits + 0xffffu : bits) & 0xffff0000u;
  const float offset = of_bits(bits);
  const float scale = scale_of(code, (most + 0.0f) - offset, top);
  const float end = scale * static_cast<float>(top);
  const bool finite = (bits_of(end + offset) & kAbsoluteBits) < kInfinityBits;
  if (!finite) return {of_bits(kNanBits), of_bits(kNanBits)};
  return {scale, offset};
}

DS_HOST_DEVICE static inline GroupScale broken_scale(const BlockCode& code) {
  return {of_bits(kNanBits), code.offset ? of_bits(kNanBits) : 0.0f};
}

// Scales and offsets in memory. Their type is that of `code`, so storing rounds nothing.
DS_HOST_DEVICE static inline float load_scale(const BlockCode& code, const void* scales, size_t i) {
  if (code.scale == DType::kBF16) return of_bits(static_cast<uint32_t>(static_cast<const uint16_t*>(scales)[i]) << 16);
  return static_cast<const float*>(scales)[i];
}
DS_HOST_DEVICE static inline void store_scale(const BlockCode& code, void* scales, size_t i, float scale) {
  if (code.scale == DType::kBF16) {
    static_cast<uint16_t*>(scales)[i] = static_cast<uint16_t>(bits_of(scale) >> 16);
  } else {
    static_cast<float*>(scales)[i] = scale;
  }
}
DS_HOST_DEVICE static inline GroupScale load_group(const BlockCode& code, const void* scales, const void* offsets,
                                                   size_t i) {
  return {load_scale(code, scales, i), code.offset ? load_scale(code, offsets, i) : 0.0f};
}
DS_HOST_DEVICE static inline void store_group(const BlockCode& code, void* scales, void* offsets, size_t i,
                                              GroupScale group) {
  store_scale(code, scales, i, group.scale);
  if (code.offset) store_scale(code, offsets, i, group.offset);
}

}  // namespace ds::kernels

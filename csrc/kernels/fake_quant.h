// The arithmetic of [Note: fake quantization] in kernels/codes.h, for all devices: each operation is rounded by itself.
#pragma once
#include <cmath>

#include "kernels/block_scale.h"
#include "kernels/random_rounding.h"

namespace ds::kernels {

// The values of some elements: the smallest and the largest one, and the largest bits of an absolute value, which are
// those of an infinity or above where an element is not finite.
struct ValueRange {
  float least, most;
  uint32_t top;
};
DS_HOST_DEVICE static inline ValueRange no_values() { return {INFINITY, -INFINITY, 0}; }
DS_HOST_DEVICE static inline ValueRange with_value(ValueRange range, float x) {
  const uint32_t bits = bits_of(x) & kAbsoluteBits;
  return {x < range.least ? x : range.least, x > range.most ? x : range.most, bits > range.top ? bits : range.top};
}
DS_HOST_DEVICE static inline ValueRange with_range(ValueRange a, ValueRange b) {
  return {b.least < a.least ? b.least : a.least, b.most > a.most ? b.most : a.most, b.top > a.top ? b.top : a.top};
}

// An element x is (x - offset) * up steps of the length `down` above the offset.
struct FakeSteps {
  float up, down, offset, low, high;
  bool broken;
};
DS_HOST_DEVICE static inline FakeSteps fake_steps(const FakeQuant& how, ValueRange range) {
  const float levels = static_cast<float>(1 << how.bits);
  const float span = how.offset ? range.most - range.least : 2.0f * of_bits(range.top);
  const float width = span + 1e-5f;
  const bool broken = range.top >= kInfinityBits || (bits_of(width) & kAbsoluteBits) >= kInfinityBits;
  const float half = how.offset ? 0.0f : levels / 2;
  return {levels / width, width / levels, how.offset ? range.least : 0.0f, 0.0f - half, levels - 1 - half, broken};
}

DS_HOST_DEVICE static inline float fake_value(const FakeQuant& how, const FakeSteps& steps, RandomKey key, float x,
                                              uint32_t element) {
  if (steps.broken) return of_bits(kNanBits);
  const float above = how.offset ? x - steps.offset : x;
  const float exact = above * steps.up;
  float number = rintf(exact);
  if (how.stochastic) {
    const float floor = floorf(exact), rest = exact - floor;
    number = static_cast<float>(random_bits(key, element) >> 8) * 0x1p-24f < rest ? floor + 1.0f : floor;
  }
  number = number < steps.low ? steps.low : number > steps.high ? steps.high : number;
  const float value = number * steps.down;
  return how.offset ? value + steps.offset : value + 0.0f;  // 0, not -0
}

}  // namespace ds::kernels

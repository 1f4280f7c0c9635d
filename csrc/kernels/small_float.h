// The arithmetic of [Note: small floats] (kernels/codes.h) for one element and one group, for all devices.
#pragma once
#include <cstring>

#include "kernels/codes.h"
#include "kernels/random_rounding.h"

namespace ds::kernels {

DS_HOST_DEVICE static inline uint32_t float_word(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof(word));
  return word;
}
DS_HOST_DEVICE static inline float word_float(uint32_t word) {
  float x;
  std::memcpy(&x, &word, sizeof(x));
  return x;
}

// The exponent of the smallest normal number.
DS_HOST_DEVICE static inline int least_exponent(const FloatCode& code) { return 2 - (1 << (code.exponent - 1)); }
DS_HOST_DEVICE static inline float power_of_two(int exponent) {
  return word_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// The code of x, which is not a NaN; `random`: 32 bits, for stochastic rounding.
DS_HOST_DEVICE static inline uint32_t encode_float(const FloatCode& code, float x, uint32_t random) {
  const int drop = 23 - code.mantissa, least = least_exponent(code);
  const uint32_t word = float_word(x), size = word & 0x7fffffffu;
  const uint32_t largest = (1u << (code.exponent + code.mantissa)) - 1;
  uint32_t found;
  if (size < static_cast<uint32_t>(least + 127) << 23) {  // below the normal numbers: their distance is fixed
    const float steps = word_float(size) * power_of_two(code.mantissa - least);
    found = static_cast<uint32_t>(steps);
    const float rest = steps - static_cast<float>(found);
    if (code.stochastic) {
      found += static_cast<float>(random >> 8) * 0x1p-24f < rest ? 1 : 0;
    } else {
      found += rest > 0.5f || (rest == 0.5f && (found & 1) != 0) ? 1 : 0;
    }
  } else {
    const uint32_t even = (1u << (drop - 1)) - 1 + (size >> drop & 1);
    const uint32_t up = code.stochastic ? random & ((1u << drop) - 1) : even;
    found = ((size + up) >> drop) - (static_cast<uint32_t>(least + 126) << code.mantissa);
  }
  return (found < largest ? found : largest) | (word >> 31) << (code.exponent + code.mantissa);
}

DS_HOST_DEVICE static inline float decode_float(const FloatCode& code, uint32_t given) {
  const uint32_t sign = given >> (code.exponent + code.mantissa) & 1, fraction = given & ((1u << code.mantissa) - 1);
  const uint32_t exponent = given >> code.mantissa & ((1u << code.exponent) - 1);
  const int least = least_exponent(code);
  const float size =
      exponent == 0
          ? static_cast<float>(fraction) * power_of_two(least - code.mantissa)
          : word_float((exponent + static_cast<uint32_t>(least + 126)) << 23 | fraction << (23 - code.mantissa));
  return sign != 0 ? -size : size;
}

// The scale of a group whose largest absolute value is `most`: a NaN if that is not finite.
DS_HOST_DEVICE static inline float float_scale(const FloatCode& code, float most) {
  if (!(most <= 3.4028234663852886e38f)) return word_float(0x7fc00000u);
  const float scale = most / decode_float(code, (1u << (code.exponent + code.mantissa)) - 1);
  return scale > 0 ? scale : 1.0f;
}

// A number of codes that fill whole bytes: how many, and in how many bytes.
struct FloatUnit {
  int codes, bytes;
};
DS_HOST_DEVICE static inline FloatUnit float_unit(const FloatCode& code) {
  const int bits = float_bits(code);
  return bits == 4 ? FloatUnit{2, 1} : bits == 6 ? FloatUnit{4, 3} : bits == 12 ? FloatUnit{2, 3} : FloatUnit{1, 1};
}

// Unit u of a group: value(i) is element i of it, `first` the number of its first element in the call.
template <typename Value>
DS_HOST_DEVICE inline void encode_unit(const FloatCode& code, float scale, RandomKey key, size_t first, size_t u,
                                       const Value& value, uint8_t* row) {
  const FloatUnit unit = float_unit(code);
  uint32_t packed = 0;
  for (int k = 0; k < unit.codes; ++k) {
    const size_t i = u * unit.codes + k;
    const uint32_t random = code.stochastic ? random_bits(key, static_cast<uint32_t>(first + i)) : 0;
    const uint32_t one = scale == scale ? encode_float(code, value(i) / scale, random) : 0;
    packed |= one << (k * float_bits(code));
  }
  for (int b = 0; b < unit.bytes; ++b) row[u * unit.bytes + b] = static_cast<uint8_t>(packed >> (8 * b));
}
template <typename Put>
DS_HOST_DEVICE inline void decode_unit(const FloatCode& code, float scale, size_t u, const uint8_t* row,
                                       const Put& put) {
  const FloatUnit unit = float_unit(code);
  const int bits = float_bits(code);
  uint32_t packed = 0;
  for (int b = 0; b < unit.bytes; ++b) packed |= uint32_t{row[u * unit.bytes + b]} << (8 * b);
  for (int k = 0; k < unit.codes; ++k)
    put(u * unit.codes + k, decode_float(code, packed >> (k * bits) & ((1u << bits) - 1)) * scale);
}

}  // namespace ds::kernels

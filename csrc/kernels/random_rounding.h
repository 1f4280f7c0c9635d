// [Note: random rounding]
// fp32 to bf16 by adding 16 random bits below the cut and truncating: the probability of going up is the fraction that
// is cut off, so the expectation is the fp32 value (Gupta et al. 2015, "Deep Learning with Limited Numerical
// Precision", section 3). The bits are a hash of (seed, stream, array, element number): the same for every thread
// count, instruction set and device. Element numbers are taken modulo 2^32. Infinities stay; a NaN stays a NaN.
#pragma once
#include <cstdint>

#include "kernels/host_device.h"

namespace ds::kernels {

struct RandomKey {
  uint32_t low, high;
};

// Steele et al. 2014, the finaliser of SplitMix64.
DS_HOST_DEVICE static inline uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// `array`: 0 for the weights, 1 + i for state i.
DS_HOST_DEVICE static inline RandomKey random_key(uint64_t seed, uint64_t stream, uint32_t array) {
  const uint64_t x = mix64(mix64(mix64(seed) ^ stream) ^ array);
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
}

// 32-bit integer hash with low bias (C. Wellons' search, 2018), twice, keyed.
DS_HOST_DEVICE static inline uint32_t random_bits(RandomKey key, uint32_t element) {
  uint32_t x = element ^ key.low;
  for (int round = 0; round < 2; ++round) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    if (round == 0) x ^= key.high;
  }
  return x;
}

// `bits` is an fp32 number; returns the bits of the bf16 one.
DS_HOST_DEVICE static inline uint16_t random_bf16(uint32_t bits, RandomKey key, uint32_t element) {
  if ((bits & 0x7f800000u) == 0x7f800000u)  // inf, or nan kept quiet
    return static_cast<uint16_t>((bits >> 16) | ((bits & 0x7fffffu) != 0 ? 0x40u : 0u));
  return static_cast<uint16_t>((bits + (random_bits(key, element) & 0xffffu)) >> 16);
}

}  // namespace ds::kernels

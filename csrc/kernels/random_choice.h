// Random choices by counting: what is chosen depends on a seed and on numbers that say what for, on nothing else, so
// that it is the same on every rank, and again when a part of a model is recomputed. No state, no generator.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/philox.h"

namespace ds::kernels {

// The place that a choice is for. Two choices with different places, or purposes, are independent of each other.
enum class ChoiceFor : uint32_t { kTokens = 1, kLayers = 2 };
struct ChoicePlace {
  uint64_t seed;
  ChoiceFor purpose;
  uint32_t step, layer, sample;
};

// 32 bits for each item of a place; four neighbouring items share a counter.
static inline PhiloxBits choice_bits(const ChoicePlace& at, uint32_t item) {
  const uint64_t seed = at.seed ^ (uint64_t{static_cast<uint32_t>(at.purpose)} << 56);
  return philox({{item / 4, at.sample, at.layer, at.step}}, seed);
}

// out[0..keep): ascending numbers below `count`; each set of `keep` numbers is equally likely. keep <= count < 2^31.
static inline void choose_items(const ChoicePlace& at, uint32_t count, uint32_t keep, int32_t* out) {
  std::vector<uint64_t> order(count);  // random bits, then the number: no two are equal
  for (uint32_t item = 0; item < count; item += 4) {
    const PhiloxBits bits = choice_bits(at, item);
    for (uint32_t i = item; i < std::min(count, item + 4); ++i) order[i] = uint64_t{bits.word[i % 4]} << 32 | i;
  }
  std::nth_element(order.begin(), order.begin() + keep, order.end());
  for (uint32_t i = 0; i < keep; ++i) out[i] = static_cast<int32_t>(order[i] & 0xffffffffu);
  std::sort(out, out + keep);
}

// A number in [0, 1).
static inline double choice_number(const ChoicePlace& at) { return choice_bits(at, 0).word[0] / 4294967296.0; }

}  // namespace ds::kernels

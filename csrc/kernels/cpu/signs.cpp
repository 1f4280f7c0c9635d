// Signs ([Note: signs] in kernels/codes.h) for each instruction set.
#include "kernels/codes.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/signs.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/sum_order.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {
using namespace hwy::HWY_NAMESPACE;

// The sum of squares of one block of [Note: order of the sum of squares]; kernels/cpu/norm.cpp has it for one array.
template <bool kError>
double squares_of_block(const float* values, const float* error, size_t n) {
  const ScalableTag<double> d;
  const Rebind<float, decltype(d)> narrow;
  constexpr size_t kWidth = MaxLanes(ScalableTag<double>());
  constexpr size_t kRegisters = kSumLanes / kWidth;
  Vec<decltype(d)> sums[kRegisters];
  for (size_t r = 0; r < kRegisters; ++r) sums[r] = Zero(d);
  size_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes) {
#pragma GCC unroll 16
    for (size_t r = 0; r < kRegisters; ++r) {
      auto sum = LoadU(narrow, values + i + r * kWidth);
      if constexpr (kError) sum = Add(sum, LoadU(narrow, error + i + r * kWidth));
      const auto x = PromoteTo(d, sum);
      sums[r] = MulAdd(x, x, sums[r]);  // the square is exact: fused or not, the sum is rounded once
    }
  }
  double lanes[kSumLanes];
  for (size_t r = 0; r < kRegisters; ++r) StoreU(sums[r], d, lanes + r * kWidth);
  for (size_t lane = 0; i < n; ++i, ++lane) {
    const float sum = kError ? values[i] + error[i] : values[i];
    lanes[lane] += static_cast<double>(sum) * sum;
  }
  return sum_of_lanes(lanes);
}

double block_squares(const ErrorSum& run, size_t begin, size_t n) {
  const float* values = run.values + begin;
  return run.error != nullptr ? squares_of_block<true>(values, run.error + begin, n)
                              : squares_of_block<false>(values, nullptr, n);
}

constexpr size_t kSignWord = 64;  // elements whose bits are written at once

// The order of bits within each byte, turned round.
HWY_INLINE uint64_t turn_bytes(uint64_t x) {
  x = (x >> 1 & 0x5555555555555555u) | (x & 0x5555555555555555u) << 1;
  x = (x >> 2 & 0x3333333333333333u) | (x & 0x3333333333333333u) << 2;
  return (x >> 4 & 0x0f0f0f0f0f0f0f0fu) | (x & 0x0f0f0f0f0f0f0f0fu) << 4;
}

template <bool kError>
void encode_sign_words(const SignRun& run, size_t begin, size_t end) {
  const ScalableTag<float> d;
  const size_t lanes = Lanes(d);
  const float step = kError ? *run.scale : 0.0f;
  const auto plus = Set(d, step), minus = Set(d, -step), zero = Zero(d);
  float* const error = run.error;
  const float* const values = run.values;
  size_t i = begin;
  for (; i + kSignWord <= end; i += kSignWord) {
    uint64_t word = 0;
    for (size_t k = 0; k < kSignWord; k += lanes) {
      auto x = LoadU(d, values + i + k);
      if constexpr (kError) x = Add(x, LoadU(d, error + i + k));
      const auto positive = Ge(x, zero);
      uint8_t found[8] = {};
      StoreMaskBits(d, positive, found);
      uint16_t bits;
      __builtin_memcpy(&bits, found, sizeof bits);
      word |= static_cast<uint64_t>(bits) << k;
      if constexpr (kError) StoreU(Sub(x, IfThenElse(positive, plus, minus)), d, error + i + k);
    }
    word = turn_bytes(word);
    __builtin_memcpy(run.bits + i / 8, &word, sizeof word);
  }
  for (; i < end; ++i) {
    float x = values[i];
    if constexpr (kError) x += error[i];
    if (i % 8 == 0) run.bits[i / 8] = 0;
    if (x >= 0) run.bits[i / 8] = static_cast<uint8_t>(run.bits[i / 8] | 128 >> i % 8);
    if constexpr (kError) error[i] = x >= 0 ? x - step : x + step;
  }
}

// `begin` is a multiple of kSignWord.
void encode_signs_range(const SignRun& run, size_t begin, size_t end) {
  run.error != nullptr ? encode_sign_words<true>(run, begin, end) : encode_sign_words<false>(run, begin, end);
}

HWY_INLINE float scale_of_part(const SignSum& run, size_t part) {
  float scale;
  __builtin_memcpy(&scale, reinterpret_cast<const char*>(run.scale) + part * run.stride, sizeof scale);
  return scale;
}

HWY_ALIGN constexpr uint32_t kLaneBits[16] = {1u << 31, 1u << 30, 1u << 29, 1u << 28, 1u << 27, 1u << 26,
                                              1u << 25, 1u << 24, 1u << 23, 1u << 22, 1u << 21, 1u << 20,
                                              1u << 19, 1u << 18, 1u << 17, 1u << 16};

// `begin` is a multiple of kSignWord.
void decode_signs_range(const SignSum& run, float factor, size_t begin, size_t end) {
  const ScalableTag<float> d;
  const RebindToUnsigned<decltype(d)> du;
  constexpr size_t kStep = 32, kRegisters = kStep / MaxLanes(ScalableTag<float>());
  const size_t lanes = Lanes(d);
  const auto lane_bits = Load(du, kLaneBits);
  const auto times = Set(d, factor);
  size_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    Vec<decltype(d)> sums[kRegisters];
    for (size_t part = 0; part < run.parts; ++part) {
      uint32_t word;
      __builtin_memcpy(&word, run.bits + part * run.stride + i / 8, sizeof word);
      word = __builtin_bswap32(word);  // element number k is the k-th bit from above
      const float scale = scale_of_part(run, part);
      const auto plus = Set(d, scale), minus = Set(d, -scale);
      for (size_t r = 0; r < kRegisters; ++r) {
        const auto bits = And(Set(du, word << (r * lanes)), lane_bits);
        const auto x = IfThenElse(RebindMask(d, Eq(bits, lane_bits)), plus, minus);
        sums[r] = part == 0 ? x : Add(sums[r], x);
      }
    }
    for (size_t r = 0; r < kRegisters; ++r) StoreU(Mul(sums[r], times), d, run.out + i + r * lanes);
  }
  for (; i < end; ++i) {
    float sum = 0;
    for (size_t part = 0; part < run.parts; ++part) {
      const float scale = scale_of_part(run, part);
      const float x = (run.bits[part * run.stride + i / 8] & 128 >> i % 8) != 0 ? scale : -scale;
      sum = part == 0 ? x : sum + x;
    }
    run.out[i] = sum * factor;
  }
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <vector>

#include "kernels/cpu/codes.h"

namespace ds::kernels::cpu {
namespace {

constexpr size_t kUnit = 64;  // elements that one thread codes at least: whole words of signs

// The order is that of kernels/sum_order.h, for each run by itself.
template <Isa isa>
void sum_squares_with_error(const Launch& launch, const ErrorSum* runs, size_t count) {
  const auto body = DS_BODY(block_squares, isa);
  std::vector<size_t> ends(count);  // of each run, in the row of all blocks
  for (size_t s = 0, end = 0; s < count; ++s) ends[s] = end += sum_blocks(runs[s].numel);
  std::vector<double> sums(count == 0 ? 0 : ends[count - 1]);
  split_units(launch, runs, count, kSumBlock, [&](size_t s, size_t first, size_t last) {
    for (size_t b = first; b < last; ++b) {
      const size_t begin = b * kSumBlock, n = std::min(kSumBlock, runs[s].numel - begin);
      sums[(s == 0 ? 0 : ends[s - 1]) + b] = body(runs[s], begin, n);
    }
  });
  for (size_t s = 0; s < count; ++s) {
    const size_t begin = s == 0 ? 0 : ends[s - 1], blocks = ends[s] - begin;
    if (blocks <= 1) {  // the other lanes would add zeros
      *runs[s].sum += blocks == 0 ? 0 : sums[begin];
      continue;
    }
    double lanes[kSumBlockLanes] = {};
    for (size_t b = 0; b < blocks; ++b) lanes[b % kSumBlockLanes] += sums[begin + b];
    *runs[s].sum += sum_of_lanes(lanes);
  }
}

template <Isa isa>
void encode_signs(const Launch& launch, const SignRun* runs, size_t count) {
  split_units(launch, runs, count, kUnit, [&](size_t s, size_t first, size_t last) {
    DS_BODY(encode_signs_range, isa)(runs[s], first * kUnit, std::min(runs[s].numel, last * kUnit));
  });
}

template <Isa isa>
void decode_signs(const Launch& launch, const SignSum* runs, size_t count, float factor) {
  split_units(launch, runs, count, kUnit, [&](size_t s, size_t first, size_t last) {
    DS_BODY(decode_signs_range, isa)(runs[s], factor, first * kUnit, std::min(runs[s].numel, last * kUnit));
  });
}

}  // namespace

const decltype(CodeKernels::sum_squares_with_error) kSumSquaresWithError[kIsaCount] =
    DS_ENTRIES(sum_squares_with_error);
const decltype(CodeKernels::encode_signs) kEncodeSigns[kIsaCount] = DS_ENTRIES(encode_signs);
const decltype(CodeKernels::decode_signs) kDecodeSigns[kIsaCount] = DS_ENTRIES(decode_signs);

}  // namespace ds::kernels::cpu
#endif

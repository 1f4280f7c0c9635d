// Blocks of integers ([Note: blocks] in kernels/codes.h) for each instruction set.
#include "kernels/codes.h"

#include <type_traits>

#include "kernels/block_scale.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/blocks.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

constexpr size_t kBlockStep = 256;  // elements whose codes are bytes in the first-level cache
// Elements ahead that are fetched while a group is coded. The group itself was read for its scale, so that memory would
// be idle meanwhile: this takes a quarter of the time away.
constexpr size_t kFetchAhead = 1024;

// Added to a number between -2^22 and 2^22, it rounds to the nearest whole number, whose low bits are those of the sum.
constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23

// A byte for each code, to two codes in a byte. `n` may be odd: `bytes` has a zero behind its end.
void pack_halves(const uint8_t* bytes, size_t n, uint8_t* codes) {
  const ScalableTag<uint16_t> d;
  const Rebind<uint8_t, decltype(d)> d8;
  const size_t lanes = Lanes(d), whole = (n + 1) / 2;
  size_t i = 0;
  for (; i + lanes <= whole; i += lanes) {
    const auto pairs = LoadU(d, reinterpret_cast<const uint16_t*>(bytes + 2 * i));
    const auto both = Or(And(pairs, Set(d, 0x0fu)), And(ShiftRight<4>(pairs), Set(d, 0xf0u)));
    StoreU(DemoteTo(d8, BitCast(RebindToSigned<decltype(d)>(), both)), d8, codes + i);
  }
  for (; i < whole; ++i) codes[i] = static_cast<uint8_t>((bytes[2 * i] & 15) | bytes[2 * i + 1] << 4);
}

// Two codes in a byte, to a byte for each, with its sign where they have one. `bytes` has room for an even number.
void unpack_halves(const uint8_t* codes, size_t n, bool has_sign, uint8_t* bytes) {
  const ScalableTag<uint16_t> d;
  const Rebind<uint8_t, decltype(d)> d8;
  const size_t lanes = Lanes(d), whole = (n + 1) / 2;
  const uint16_t sign = has_sign ? 0x0808 : 0;
  size_t i = 0;
  for (; i + lanes <= whole; i += lanes) {
    const auto both = PromoteTo(d, LoadU(d8, codes + i));
    const auto pairs = Or(And(both, Set(d, 0x0fu)), And(ShiftLeft<4>(both), Set(d, 0x0f00u)));
    const auto negative = And(pairs, Set(d, sign));  // bit 3 of each byte, which goes to bits 4 to 7
    const auto two = Or(ShiftLeft<1>(negative), ShiftLeft<2>(negative));
    StoreU(Or(pairs, Or(two, ShiftLeft<2>(two))), d, reinterpret_cast<uint16_t*>(bytes + 2 * i));
  }
  const int low = has_sign ? 8 : 0;
  for (; i < whole; ++i) {
    bytes[2 * i] = static_cast<uint8_t>(((codes[i] & 15) ^ low) - low);
    bytes[2 * i + 1] = static_cast<uint8_t>((codes[i] >> 4 ^ low) - low);
  }
}

template <bool kError, class D, class T>
HWY_INLINE Vec<D> load_with_error(D d, const T* values, const float* error, size_t i) {
  const auto x = load(d, values + i);
  if constexpr (kError) return Add(x, LoadU(d, error + i));
  return x;
}

// The largest absolute value of n elements of 16 bits. Their bits are in the order of the numbers, so that no element
// has to be widened.
template <class T>
float largest_of_halves(const T* values, size_t n) {
  const ScalableTag<int16_t> d;
  const size_t lanes = Lanes(d);
  const auto* bits = reinterpret_cast<const int16_t*>(values);
  const auto absolute = Set(d, 0x7fff);
  auto most = Zero(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) most = Max(most, And(LoadU(d, bits + i), absolute));
  int16_t each[MaxLanes(ScalableTag<int16_t>())];
  StoreU(most, d, each);
  int top = 0;
  for (size_t lane = 0; lane < lanes; ++lane) top = each[lane] > top ? each[lane] : top;
  for (; i < n; ++i) top = (bits[i] & 0x7fff) > top ? bits[i] & 0x7fff : top;
  return to_float(T{static_cast<uint16_t>(top)});
}

// The scale of n > 0 elements.
template <bool kError, class T>
GroupScale scale_of_elements(const BlockCode& code, const T* values, const float* error, size_t n) {
  const ScalableTag<float> d;
  const RebindToSigned<decltype(d)> di;
  const size_t lanes = Lanes(d);
  // Bits of absolute values are in the order of the numbers, and those of infinity and NaN above all.
  const auto absolute = Set(di, static_cast<int32_t>(kAbsoluteBits));
  int32_t top = 0;
  size_t i = 0;
  if constexpr (!kError && sizeof(T) == 2) {
    if (!code.offset) {
      const float largest = largest_of_halves(values, n);
      return bits_of(largest) >= kInfinityBits ? broken_scale(code) : symmetric_scale(code, largest);
    }
  }
  if (!code.offset) {
    auto most = Zero(di), most2 = Zero(di);  // two, so that neither waits for the other
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      most = Max(most, And(BitCast(di, load_with_error<kError>(d, values, error, i)), absolute));
      most2 = Max(most2, And(BitCast(di, load_with_error<kError>(d, values, error, i + lanes)), absolute));
    }
    top = GetLane(MaxOfLanes(di, Max(most, most2)));
    const CappedTag<float, 1> one;
    for (; i < n; ++i) {
      const float x = GetLane(load_with_error<kError>(one, values, error, i));
      const auto bits = static_cast<int32_t>(bits_of(x) & kAbsoluteBits);
      top = bits > top ? bits : top;
    }
    if (static_cast<uint32_t>(top) >= kInfinityBits) return broken_scale(code);
    return symmetric_scale(code, of_bits(static_cast<uint32_t>(top)));
  }
  const CappedTag<float, 1> one;
  float least = GetLane(load_with_error<kError>(one, values, error, 0)), most = least;
  auto low = Set(d, least), high = low;
  auto bits = Zero(di);
  for (; i + lanes <= n; i += lanes) {
    const auto x = load_with_error<kError>(d, values, error, i);
    low = Min(low, x);
    high = Max(high, x);
    bits = Max(bits, And(BitCast(di, x), absolute));
  }
  least = GetLane(MinOfLanes(d, low));
  most = GetLane(MaxOfLanes(d, high));
  top = GetLane(MaxOfLanes(di, bits));
  for (; i < n; ++i) {
    const float x = GetLane(load_with_error<kError>(one, values, error, i));
    const auto of_x = static_cast<int32_t>(bits_of(x) & kAbsoluteBits);
    top = of_x > top ? of_x : top;
    least = x < least ? x : least;
    most = x > most ? x : most;
  }
  if (static_cast<uint32_t>(top) >= kInfinityBits) return broken_scale(code);
  return offset_scale(code, least, most);
}

// A byte for the code of each of n elements, and what is left in `error`.
template <bool kError, bool kOffset, class T>
void code_elements(GroupScale group, float beta, const T* values, float* error, size_t n, uint8_t* bytes) {
  const float divisor = group.scale > 0 ? group.scale : 1.0f, rest = 1.0f - beta;
  each_element(n, [&](auto d, size_t i) HWY_ATTR {
    const RebindToUnsigned<decltype(d)> du;
    const Rebind<uint8_t, decltype(d)> d8;
    __builtin_prefetch(values + i + kFetchAhead);
    const auto x = load_with_error<kError>(d, values, error, i);
    const auto above = kOffset ? Sub(x, Set(d, group.offset)) : x;
    const auto rounded = Add(Div(above, Set(d, divisor)), Set(d, kRounds));
    StoreU(TruncateTo(d8, BitCast(du, rounded)), d8, bytes + i);
    if constexpr (kError) {
      auto decoded = Mul(Sub(rounded, Set(d, kRounds)), Set(d, group.scale));
      if constexpr (kOffset) decoded = Add(decoded, Set(d, group.offset));
      const auto kept = Mul(Set(d, beta), LoadU(d, error + i));
      StoreU(Add(kept, Mul(Set(d, rest), Sub(x, decoded))), d, error + i);
    }
  });
}

template <bool kError, bool kOffset, class T>
void encode_groups(const BlockCode& code, const BlockRun& run, size_t first, size_t last) {
  const T* const values = static_cast<const T*>(run.values);
  for (size_t g = first; g < last; ++g) {
    const size_t begin = g * code.group;
    const size_t n = run.numel - begin < code.group ? run.numel - begin : code.group;
    float* const error = kError ? run.error + begin : nullptr;
    const GroupScale group = scale_of_elements<kError>(code, values + begin, error, n);
    store_group(code, run.scales, run.offsets, g, group);
    uint8_t* const codes = run.codes + begin * code.bits / 8;
    if (group.scale != group.scale) {
      for (size_t i = 0; i < (n * code.bits + 7) / 8; ++i) codes[i] = 0;
      continue;
    }
    if (code.bits == 8) {
      code_elements<kError, kOffset>(group, run.beta, values + begin, error, n, codes);
      continue;
    }
    for (size_t at = 0; at < n; at += kBlockStep) {
      uint8_t bytes[kBlockStep];
      const size_t here = n - at < kBlockStep ? n - at : kBlockStep;
      code_elements<kError, kOffset>(group, run.beta, values + begin + at, kError ? error + at : nullptr, here, bytes);
      if (here % 2 != 0) bytes[here] = 0;
      pack_halves(bytes, here, codes + at / 2);
    }
  }
}

// Groups [first, last) of a run.
void encode_blocks_range(const BlockCode& code, DType dtype, const BlockRun& run, size_t first, size_t last) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if (run.error != nullptr) {
      code.offset ? encode_groups<true, true, T>(code, run, first, last)
                  : encode_groups<true, false, T>(code, run, first, last);
    } else {
      code.offset ? encode_groups<false, true, T>(code, run, first, last)
                  : encode_groups<false, false, T>(code, run, first, last);
    }
  });
}

// The place of decoded elements.
template <class T>
struct BlockOut {
  T* out;       // of the elements that are decoded
  float* sums;  // of the parts so far
  float factor;
};

// Decodes n elements of one group of one part. Of the last part they become `out`.
template <bool kFirst, bool kLast, bool kAdd, class Code, class T>
void add_elements(GroupScale group, const uint8_t* bytes, size_t n, const BlockOut<T>& to) {
  each_element(n, [&](auto d, size_t i) HWY_ATTR {
    const RebindToSigned<decltype(d)> di;
    const Rebind<Code, decltype(d)> d8;
    const auto number = ConvertTo(d, PromoteTo(di, LoadU(d8, reinterpret_cast<const Code*>(bytes) + i)));
    auto x = Mul(number, Set(d, group.scale));
    if constexpr (std::is_same_v<Code, uint8_t>) x = Add(x, Set(d, group.offset));
    if constexpr (!kFirst) x = Add(LoadU(d, to.sums + i), x);
    if constexpr (!kLast) {
      StoreU(x, d, to.sums + i);
    } else {
      x = Mul(x, Set(d, to.factor));
      if constexpr (kAdd) x = Add(load(d, to.out + i), x);
      store(d, x, to.out + i);
    }
  });
}

template <bool kAdd, class Code, class T>
void decode_elements(const BlockCode& code, const BlockSum& run, float factor, size_t begin, size_t end) {
  uint8_t bytes[kBlockStep];
  float sums[kBlockStep];
  for (size_t at = begin; at < end;) {
    const size_t g = at / code.group;
    size_t n = end - at < kBlockStep ? end - at : kBlockStep;
    if (n > (g + 1) * code.group - at) n = (g + 1) * code.group - at;
    const BlockOut<T> to = {static_cast<T*>(run.out) + at, sums, factor};
    for (size_t part = 0; part < run.parts; ++part) {
      const size_t behind = part * run.stride;
      const auto of_part = [&](const void* data) {
        return data != nullptr ? static_cast<const char*>(data) + behind : nullptr;
      };
      const GroupScale group = load_group(code, of_part(run.scales), of_part(run.offsets), g);
      const uint8_t* codes = run.codes + behind + at * code.bits / 8;
      if (code.bits == 4) {
        unpack_halves(codes, n, !code.offset, bytes);
        codes = bytes;
      }
      const bool first = part == 0, last = part + 1 == run.parts;
      if (first && last) add_elements<true, true, kAdd, Code>(group, codes, n, to);
      if (first && !last) add_elements<true, false, kAdd, Code>(group, codes, n, to);
      if (!first && last) add_elements<false, true, kAdd, Code>(group, codes, n, to);
      if (!first && !last) add_elements<false, false, kAdd, Code>(group, codes, n, to);
    }
    at += n;
  }
}

// `begin` is even.
void decode_blocks_range(const BlockCode& code, DType dtype, const BlockSum& run, float factor, bool add, size_t begin,
                         size_t end) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if (code.offset) {
      add ? decode_elements<true, uint8_t, T>(code, run, factor, begin, end)
          : decode_elements<false, uint8_t, T>(code, run, factor, begin, end);
    } else {
      add ? decode_elements<true, int8_t, T>(code, run, factor, begin, end)
          : decode_elements<false, int8_t, T>(code, run, factor, begin, end);
    }
  });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>

#include "kernels/cpu/codes.h"

namespace ds::kernels::cpu {
namespace {

template <Isa isa>
void encode_blocks(const Launch& launch, const BlockCode& code, DType values, const BlockRun* runs, size_t count) {
  split_units(launch, runs, count, code.group, [&](size_t s, size_t first, size_t last) {
    DS_BODY(encode_blocks_range, isa)(code, values, runs[s], first, last);
  });
}

template <Isa isa>
void decode_blocks(const Launch& launch, const BlockCode& code, DType out, const BlockSum* runs, size_t count,
                   float factor, bool add) {
  constexpr size_t kElements = 256;
  split_units(launch, runs, count, kElements, [&](size_t s, size_t first, size_t last) {
    DS_BODY(decode_blocks_range, isa)
    (code, out, runs[s], factor, add, first * kElements, std::min(runs[s].numel, last * kElements));
  });
}

}  // namespace

const decltype(CodeKernels::encode_blocks) kEncodeBlocks[kIsaCount] = DS_ENTRIES(encode_blocks);
const decltype(CodeKernels::decode_blocks) kDecodeBlocks[kIsaCount] = DS_ENTRIES(decode_blocks);

}  // namespace ds::kernels::cpu
#endif

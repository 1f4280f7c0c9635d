// Fake quantization ([Note: fake quantization] in kernels/codes.h) for each instruction set.
#include "kernels/fake_quant.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/fake_quant.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"
#include "kernels/cpu/random-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

template <class T>
ValueRange range_of(const T* values, size_t n) {
  const ScalableTag<float> d;
  const RebindToSigned<decltype(d)> di;
  const size_t lanes = Lanes(d);
  // Bits of absolute values are in the order of the numbers, and those of infinity and NaN above all.
  const auto absolute = Set(di, static_cast<int32_t>(kAbsoluteBits));
  auto low = Set(d, INFINITY), high = Set(d, -INFINITY);
  auto bits = Zero(di);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto x = load(d, values + i);
    low = Min(low, x);
    high = Max(high, x);
    bits = Max(bits, And(BitCast(di, x), absolute));
  }
  ValueRange range = {GetLane(MinOfLanes(d, low)), GetLane(MaxOfLanes(d, high)),
                      static_cast<uint32_t>(GetLane(MaxOfLanes(di, bits)))};
  const CappedTag<float, 1> one;
  for (; i < n; ++i) range = with_value(range, GetLane(load(one, values + i)));
  return range;
}

template <bool kOffset, bool kStochastic, class T>
void round_elements(const FakeSteps& steps, RandomKey key, T* values, size_t n, uint32_t first) {
  each_element(n, [&](auto d, size_t i) HWY_ATTR {
    const RebindToUnsigned<decltype(d)> d32;
    const RebindToSigned<decltype(d)> s32;
    const auto x = load(d, values + i);
    const auto exact = Mul(kOffset ? Sub(x, Set(d, steps.offset)) : x, Set(d, steps.up));
    auto number = Round(exact);
    if constexpr (kStochastic) {
      const auto below = Floor(exact);
      const auto random = ShiftRight<8>(random_bits_from(d32, key, first + static_cast<uint32_t>(i)));
      const auto share = Mul(ConvertTo(d, BitCast(s32, random)), Set(d, 0x1p-24f));
      number = IfThenElse(Lt(share, Sub(exact, below)), Add(below, Set(d, 1.0f)), below);
    }
    number = Min(Max(number, Set(d, steps.low)), Set(d, steps.high));
    const auto value = Mul(number, Set(d, steps.down));
    store(d, Add(value, Set(d, kOffset ? steps.offset : 0.0f)), values + i);
  });
}

template <class T>
void round_values(const FakeQuant& how, const FakeSteps& steps, T* values, size_t n, uint32_t first) {
  const RandomKey key = random_key(how.seed, 0, 0);
  if (steps.broken) {
    each_element(n, [&](auto d, size_t i) HWY_ATTR { store(d, Set(d, of_bits(kNanBits)), values + i); });
  } else if (how.offset) {
    how.stochastic ? round_elements<true, true>(steps, key, values, n, first)
                   : round_elements<true, false>(steps, key, values, n, first);
  } else {
    how.stochastic ? round_elements<false, true>(steps, key, values, n, first)
                   : round_elements<false, false>(steps, key, values, n, first);
  }
}

ValueRange fake_range(DType dtype, const void* values, size_t begin, size_t end) {
  ValueRange range = no_values();
  with_type(dtype,
            [&](auto type) { range = range_of(static_cast<const decltype(type)*>(values) + begin, end - begin); });
  return range;
}
void fake_round(const FakeQuant& how, const FakeSteps& steps, DType dtype, void* values, size_t begin, size_t end) {
  with_type(dtype, [&](auto type) {
    round_values(how, steps, static_cast<decltype(type)*>(values) + begin, end - begin, static_cast<uint32_t>(begin));
  });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <vector>

#include "kernels/cpu/codes.h"

namespace ds::kernels::cpu {
namespace {

// Groups of at most as many elements are in the cache when they are rounded; longer ones are read twice, in pieces.
constexpr size_t kPiece = 16384;

template <Isa isa>
void fake_quant(const Launch& launch, const FakeQuant& how, DType dtype, void* values, size_t numel) {
  if (how.group <= kPiece) {
    const Segment all = {values, numel};
    return split_units(launch, &all, 1, how.group, [&](size_t, size_t first, size_t last) {
      for (size_t g = first; g < last; ++g) {
        const size_t begin = g * how.group, end = std::min(numel, begin + how.group);
        const FakeSteps steps = fake_steps(how, DS_BODY(fake_range, isa)(dtype, values, begin, end));
        DS_BODY(fake_round, isa)(how, steps, dtype, values, begin, end);
      }
    });
  }
  for (size_t begin = 0; begin < numel; begin += how.group) {
    const size_t end = std::min(numel, begin + how.group), pieces = (end - begin + kPiece - 1) / kPiece;
    std::vector<ValueRange> ranges(pieces);
    const auto each = [&](const auto& body) {
      split(launch, end - begin, [&](size_t from, size_t to) {
        for (size_t p = (from + kPiece - 1) / kPiece; p * kPiece < to; ++p)
          body(p, begin + p * kPiece, std::min(end, begin + (p + 1) * kPiece));
      });
    };
    each(
        [&](size_t p, size_t first, size_t last) { ranges[p] = DS_BODY(fake_range, isa)(dtype, values, first, last); });
    ValueRange whole = no_values();
    for (const ValueRange& range : ranges) whole = with_range(whole, range);
    const FakeSteps steps = fake_steps(how, whole);
    each([&](size_t, size_t first, size_t last) { DS_BODY(fake_round, isa)(how, steps, dtype, values, first, last); });
  }
}

}  // namespace

const decltype(CodeKernels::fake_quant) kFakeQuant[kIsaCount] = DS_ENTRIES(fake_quant);

}  // namespace ds::kernels::cpu
#endif

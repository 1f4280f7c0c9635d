// Random bits of [Note: random rounding] and of [Note: dropout] in vectors. Included once per instruction set, as
// kernels/cpu/convert-inl.h is.
#if defined(DS_KERNELS_CPU_RANDOM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_KERNELS_CPU_RANDOM_INL_H_
#undef DS_KERNELS_CPU_RANDOM_INL_H_
#else
#define DS_KERNELS_CPU_RANDOM_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/philox.h"
#include "kernels/random_rounding.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

template <class D32, class V>
HWY_INLINE V mixed(D32 d, V x) {
  x = Xor(x, ShiftRight<16>(x));
  x = Mul(x, Set(d, 0x7feb352du));
  x = Xor(x, ShiftRight<15>(x));
  x = Mul(x, Set(d, 0x846ca68bu));
  return Xor(x, ShiftRight<16>(x));
}

// random_bits() of elements first, first + 1, ...
template <class D32>
HWY_INLINE Vec<D32> random_bits_from(D32 d, RandomKey key, uint32_t first) {
  return mixed(d, Xor(mixed(d, Xor(Iota(d, first), Set(d, key.low))), Set(d, key.high)));
}

// The high halves of products.
template <class D, class V = Vec<D>>
HWY_INLINE V high_product(D d, V a, uint32_t b) {
#if HWY_TARGET == HWY_SCALAR
  return Set(d, static_cast<uint32_t>((uint64_t{GetLane(a)} * b) >> 32));
#else
  const RepartitionToWide<D> wide;
  const auto times = Set(d, b);
  const auto even = MulEven(a, times), odd = MulEven(BitCast(d, ShiftRight<32>(BitCast(wide, a))), times);
  return BitCast(d, Or(ShiftRight<32>(even), And(odd, Set(wide, 0xffffffff00000000u))));
#endif
}

// The words of counters in vectors: one counter in each lane.
template <class V>
struct PhiloxVectors {
  V a, b, c, d;
};
template <class D32>
HWY_INLINE PhiloxVectors<Vec<D32>> philox_of(D32 bits, PhiloxVectors<Vec<D32>> x, uint64_t seed) {
  uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const auto first = Mul(x.a, Set(bits, kPhiloxA)), second = Mul(x.c, Set(bits, kPhiloxB));
    const auto from_a = high_product(bits, x.a, kPhiloxA), from_c = high_product(bits, x.c, kPhiloxB);
    x.a = Xor(Xor(from_c, x.b), Set(bits, low)), x.b = second;
    x.c = Xor(Xor(from_a, x.d), Set(bits, high)), x.d = first;
    low += kPhiloxLow, high += kPhiloxHigh;
  }
  return x;
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

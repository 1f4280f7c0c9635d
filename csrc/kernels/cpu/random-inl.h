// Random bits of [Note: random rounding] in vectors. Included once per instruction set, as kernels/cpu/convert-inl.h
// is.
#if defined(DS_KERNELS_CPU_RANDOM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_KERNELS_CPU_RANDOM_INL_H_
#undef DS_KERNELS_CPU_RANDOM_INL_H_
#else
#define DS_KERNELS_CPU_RANDOM_INL_H_
#endif

#include "hwy/highway.h"
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

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

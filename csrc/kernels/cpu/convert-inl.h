// Vector loads and stores that convert: whatever the memory holds (float, Bf16, Fp16), registers hold fp32.
// The same bits as base/half.h, which has the explanations. Included once per instruction set, hence no pragma once
// but Highway's toggle.
#if defined(DS_KERNELS_CPU_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_KERNELS_CPU_CONVERT_INL_H_
#undef DS_KERNELS_CPU_CONVERT_INL_H_
#else
#define DS_KERNELS_CPU_CONVERT_INL_H_
#endif

#include "base/dtype.h"
#include "base/half.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {
using namespace hwy::HWY_NAMESPACE;

template <class D>
HWY_INLINE Vec<D> load(D d, const float* p) {
  return LoadU(d, p);
}

template <class D>
HWY_INLINE void store(D d, Vec<D> v, float* p) {
  StoreU(v, d, p);
}

template <class D>
HWY_INLINE Vec<D> load(D d, const Bf16* p) {
  const Rebind<uint16_t, D> d16;
  const RebindToUnsigned<D> d32;
  return BitCast(d, ShiftLeft<16>(PromoteTo(d32, LoadU(d16, reinterpret_cast<const uint16_t*>(p)))));
}

// The low halves of 32-bit lanes that are all below 65536.
template <class D32, class V>
HWY_INLINE void store_low_halves(D32 d32, V bits, uint16_t* p) {
  const RebindToSigned<D32> s32;
  const Rebind<uint16_t, D32> d16;
  StoreU(DemoteTo(d16, BitCast(s32, bits)), d16, p);
}

template <class D>
HWY_INLINE void store(D d, Vec<D> v, Bf16* p) {
  const RebindToUnsigned<D> d32;
  const RebindToSigned<D> s32;
  const auto u = BitCast(d32, v);
  const auto high = ShiftRight<16>(u);
  const auto rounded = ShiftRight<16>(Add(u, Add(Set(d32, 0x7fffu), And(high, Set(d32, 1u)))));
  const auto magnitude = BitCast(s32, And(u, Set(d32, 0x7fffffffu)));
  const auto nan = RebindMask(d32, Gt(magnitude, Set(s32, 0x7f800000)));
  store_low_halves(d32, IfThenElse(nan, Or(high, Set(d32, 0x40u)), rounded), reinterpret_cast<uint16_t*>(p));
}

// F16C and NEON convert in hardware, to nearest even. Highway's emulation for the rest truncates: not used.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
template <class D>
HWY_INLINE Vec<D> load(D d, const Fp16* p) {
  const Rebind<hwy::float16_t, D> d16;
  return PromoteTo(d, LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
}

template <class D>
HWY_INLINE void store(D d, Vec<D> v, Fp16* p) {
  const Rebind<hwy::float16_t, D> d16;
  StoreU(DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
}
#else
template <class D>
HWY_INLINE Vec<D> load(D d, const Fp16* p) {
  const Rebind<uint16_t, D> d16;
  const RebindToUnsigned<D> d32;
  const RebindToSigned<D> s32;
  const auto half = PromoteTo(d32, LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  const auto sign = ShiftLeft<16>(And(half, Set(d32, 0x8000u)));
  const auto magnitude = And(half, Set(d32, 0x7fffu));
  const auto as_int = BitCast(s32, magnitude);
  const auto shifted = ShiftLeft<13>(magnitude);
  const auto normal = Add(shifted, Set(d32, 0x38000000u));
  const auto special = Or(shifted, Set(d32, 0x7f800000u));
  const auto small = BitCast(d32, Mul(ConvertTo(d, as_int), Set(d, 0x1p-24f)));
  const auto is_special = RebindMask(d32, Gt(as_int, Set(s32, 0x7bff)));
  const auto is_small = RebindMask(d32, Lt(as_int, Set(s32, 0x0400)));
  const auto bits = IfThenElse(is_special, special, IfThenElse(is_small, small, normal));
  return BitCast(d, Or(sign, bits));
}

template <class D>
HWY_INLINE void store(D d, Vec<D> v, Fp16* p) {
  const RebindToUnsigned<D> d32;
  const RebindToSigned<D> s32;
  const auto u = BitCast(d32, v);
  const auto sign = And(ShiftRight<16>(u), Set(d32, 0x8000u));
  const auto magnitude = And(u, Set(d32, 0x7fffffffu));
  const auto as_int = BitCast(s32, magnitude);
  const auto odd = And(ShiftRight<13>(magnitude), Set(d32, 1u));
  const auto normal = ShiftRight<13>(Add(Add(magnitude, Set(d32, 0xc8000fffu)), odd));
  const auto small = Sub(BitCast(d32, Add(BitCast(d, magnitude), Set(d, 0.5f))), Set(d32, 0x3f000000u));
  const auto nan = Or(Set(d32, 0x7e00u), And(ShiftRight<13>(magnitude), Set(d32, 0x3ffu)));
  const auto is_small = RebindMask(d32, Lt(as_int, Set(s32, 0x38800000)));
  const auto is_large = RebindMask(d32, Gt(as_int, Set(s32, 0x477fefff)));
  const auto is_nan = RebindMask(d32, Gt(as_int, Set(s32, 0x7f800000)));
  const auto finite = IfThenElse(is_small, small, normal);
  const auto bits = IfThenElse(is_nan, nan, IfThenElse(is_large, Set(d32, 0x7c00u), finite));
  store_low_halves(d32, Or(sign, bits), reinterpret_cast<uint16_t*>(p));
}
#endif

// Calls step(d, i) for all elements [i, i + Lanes(d)) of n: vectors first, then the last few one at a time.
template <class Step>
HWY_INLINE void each_element(size_t n, const Step& step) {
  const ScalableTag<float> d;
  const size_t lanes = Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) step(d, i);
  const CappedTag<float, 1> one;
  for (; i < n; ++i) step(one, i);
}

// Calls body(T{}) with the element type of a dtype other than fp64.
template <class Body>
HWY_INLINE void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kF32: return body(float{});
    case DType::kF16: return body(Fp16{});
    case DType::kBF16: return body(Bf16{});
    case DType::kF64: break;
  }
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

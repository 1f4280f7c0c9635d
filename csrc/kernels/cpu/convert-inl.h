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
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* p) {
  return hn::LoadU(d, p);
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, float* p) {
  hn::StoreU(v, d, p);
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const Bf16* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)))));
}

// The low halves of 32-bit lanes that are all below 65536.
template <class D32, class V>
HWY_INLINE void store_low_halves(D32 d32, V bits, uint16_t* p) {
  const hn::RebindToSigned<D32> s32;
  const hn::Rebind<uint16_t, D32> d16;
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(s32, bits)), d16, p);
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, Bf16* p) {
  const hn::RebindToUnsigned<D> d32;
  const hn::RebindToSigned<D> s32;
  const auto u = hn::BitCast(d32, v);
  const auto high = hn::ShiftRight<16>(u);
  const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(hn::Set(d32, 0x7fffu), hn::And(high, hn::Set(d32, 1u)))));
  const auto magnitude = hn::BitCast(s32, hn::And(u, hn::Set(d32, 0x7fffffffu)));
  const auto nan = hn::RebindMask(d32, hn::Gt(magnitude, hn::Set(s32, 0x7f800000)));
  store_low_halves(d32, hn::IfThenElse(nan, hn::Or(high, hn::Set(d32, 0x40u)), rounded),
                   reinterpret_cast<uint16_t*>(p));
}

// F16C and NEON convert in hardware, to nearest even. Highway's emulation for the rest truncates: not used.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const Fp16* p) {
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, Fp16* p) {
  const hn::Rebind<hwy::float16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
}
#else
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const Fp16* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const hn::RebindToSigned<D> s32;
  const auto half = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(d32, 0x8000u)));
  const auto magnitude = hn::And(half, hn::Set(d32, 0x7fffu));
  const auto as_int = hn::BitCast(s32, magnitude);
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  const auto normal = hn::Add(shifted, hn::Set(d32, 0x38000000u));
  const auto special = hn::Or(shifted, hn::Set(d32, 0x7f800000u));
  const auto small = hn::BitCast(d32, hn::Mul(hn::ConvertTo(d, as_int), hn::Set(d, 0x1p-24f)));
  const auto is_special = hn::RebindMask(d32, hn::Gt(as_int, hn::Set(s32, 0x7bff)));
  const auto is_small = hn::RebindMask(d32, hn::Lt(as_int, hn::Set(s32, 0x0400)));
  const auto bits = hn::IfThenElse(is_special, special, hn::IfThenElse(is_small, small, normal));
  return hn::BitCast(d, hn::Or(sign, bits));
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, Fp16* p) {
  const hn::RebindToUnsigned<D> d32;
  const hn::RebindToSigned<D> s32;
  const auto u = hn::BitCast(d32, v);
  const auto sign = hn::And(hn::ShiftRight<16>(u), hn::Set(d32, 0x8000u));
  const auto magnitude = hn::And(u, hn::Set(d32, 0x7fffffffu));
  const auto as_int = hn::BitCast(s32, magnitude);
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d32, 1u));
  const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, hn::Set(d32, 0xc8000fffu)), odd));
  const auto small =
      hn::Sub(hn::BitCast(d32, hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f))), hn::Set(d32, 0x3f000000u));
  const auto nan = hn::Or(hn::Set(d32, 0x7e00u), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d32, 0x3ffu)));
  const auto is_small = hn::RebindMask(d32, hn::Lt(as_int, hn::Set(s32, 0x38800000)));
  const auto is_large = hn::RebindMask(d32, hn::Gt(as_int, hn::Set(s32, 0x477fefff)));
  const auto is_nan = hn::RebindMask(d32, hn::Gt(as_int, hn::Set(s32, 0x7f800000)));
  const auto finite = hn::IfThenElse(is_small, small, normal);
  const auto bits = hn::IfThenElse(is_nan, nan, hn::IfThenElse(is_large, hn::Set(d32, 0x7c00u), finite));
  store_low_halves(d32, hn::Or(sign, bits), reinterpret_cast<uint16_t*>(p));
}
#endif

// Calls step(d, i) for all elements [i, i + Lanes(d)) of n: vectors first, then the last few one at a time.
template <class Step>
HWY_INLINE void each_element(size_t n, const Step& step) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) step(d, i);
  const hn::CappedTag<float, 1> one;
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

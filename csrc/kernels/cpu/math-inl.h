// Exponentials and their relatives in vectors of fp32. Included once per instruction set, as kernels/cpu/convert-inl.h.
#if defined(DS_KERNELS_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_KERNELS_CPU_MATH_INL_H_
#undef DS_KERNELS_CPU_MATH_INL_H_
#else
#define DS_KERNELS_CPU_MATH_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

// exp(x) for x below 88; 0 below -87.3. A nan stays one. Cody and Waite's reduction, Cephes' polynomial.
template <class D, class V = Vec<D>>
HWY_INLINE V exp_of(D d, V x) {
  const RebindToSigned<D> whole;
  const V n = Round(Mul(x, Set(d, 1.44269504088896341f)));
  const V r = MulAdd(n, Set(d, 2.12194440e-4f), MulAdd(n, Set(d, -0.693359375f), x));
  V p = MulAdd(Set(d, 1.9875691500e-4f), r, Set(d, 1.3981999507e-3f));
  p = MulAdd(p, r, Set(d, 8.3334519073e-3f));
  p = MulAdd(p, r, Set(d, 4.1665795894e-2f));
  p = MulAdd(p, r, Set(d, 1.6666665459e-1f));
  p = MulAdd(p, r, Set(d, 5.0000001201e-1f));
  const V y = Add(MulAdd(p, Mul(r, r), r), Set(d, 1.0f));
  const auto power = ShiftLeft<23>(Add(ConvertTo(whole, n), Set(whole, 127)));
  return IfThenZeroElse(Lt(x, Set(d, -87.3f)), Mul(y, BitCast(d, power)));
}

// tanh(x); near 0 by Cephes' polynomial, since 1 - exp(-2x) would lose digits.
template <class D, class V = Vec<D>>
HWY_INLINE V tanh_of(D d, V x) {
  const V one = Set(d, 1.0f), size = Abs(x), square = Mul(x, x);
  const V e = exp_of(d, Mul(size, Set(d, -2.0f)));
  const V far = CopySignToAbs(Div(Sub(one, e), Add(one, e)), x);
  V p = MulAdd(Set(d, -5.70498872745e-3f), square, Set(d, 2.06390887954e-2f));
  p = MulAdd(p, square, Set(d, -5.37397155531e-2f));
  p = MulAdd(p, square, Set(d, 1.33314422036e-1f));
  p = MulAdd(p, square, Set(d, -3.33332819422e-1f));
  return IfThenElse(Lt(size, Set(d, 0.625f)), MulAdd(Mul(p, square), x, x), far);
}

// erf(x), off by 2e-7 at most. Abramowitz and Stegun, 7.1.26.
template <class D, class V = Vec<D>>
HWY_INLINE V erf_of(D d, V x) {
  const V size = Abs(x), t = Div(Set(d, 1.0f), MulAdd(Set(d, 0.3275911f), size, Set(d, 1.0f)));
  V p = MulAdd(Set(d, 1.061405429f), t, Set(d, -1.453152027f));
  p = MulAdd(p, t, Set(d, 1.421413741f));
  p = MulAdd(p, t, Set(d, -0.284496736f));
  p = MulAdd(p, t, Set(d, 0.254829592f));
  const V tail = Mul(Mul(p, t), exp_of(d, Neg(Mul(size, size))));
  return CopySignToAbs(Sub(Set(d, 1.0f), tail), x);
}

// 1 / (1 + exp(-x)).
template <class D, class V = Vec<D>>
HWY_INLINE V sigmoid_of(D d, V x) {
  const V e = exp_of(d, Neg(Abs(x))), one = Set(d, 1.0f), s = Div(one, Add(one, e));
  return IfThenElse(Lt(x, Zero(d)), Sub(one, s), s);
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

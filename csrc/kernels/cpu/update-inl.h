// The loop of an element-wise rule, for the instruction set that is being compiled.
#if defined(DS_KERNELS_CPU_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_KERNELS_CPU_UPDATE_INL_H_
#undef DS_KERNELS_CPU_UPDATE_INL_H_
#else
#define DS_KERNELS_CPU_UPDATE_INL_H_
#endif

#include "kernels/cpu/convert-inl.h"
#include "kernels/cpu/update_range.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

struct NoLp {};
template <class D>
HWY_INLINE void store(D, Vec<D>, NoLp*) {}

template <class Rule, class Grad, class Lp>
void update_elements(const UpdateRange& r, const Grad* grad, Lp* lp, const typename Rule::Constants& c) {
  // Copies, because the compiler must assume that the stores below change what a reference refers to.
  const typename Rule::Constants constants = c;
  const float grad_scale = r.grad_scale;
  float* const p = r.master;
  float* states[Rule::kStates];
  for (int k = 0; k < Rule::kStates; ++k) states[k] = r.states[k];
  each_element(r.n, [&](auto d, size_t i) HWY_ATTR {
    auto weight = load(d, p + i);
    Vec<decltype(d)> s[Rule::kStates];
    for (int k = 0; k < Rule::kStates; ++k) s[k] = load(d, states[k] + i);
    Rule::step(d, weight, s, Mul(load(d, grad + i), Set(d, grad_scale)), constants);
    for (int k = 0; k < Rule::kStates; ++k) store(d, s[k], states[k] + i);
    store(d, weight, p + i);
    store(d, weight, lp + i);
  });
}

// Rule: kStates, Constants, and step(d, p, s, g, constants), which updates the vectors p and s[0..kStates) in place.
template <class Rule>
HWY_INLINE void update_all(const UpdateRange& r, const void* constants) {
  const auto& c = *static_cast<const typename Rule::Constants*>(constants);
  with_type(r.grad_dtype, [&](auto g) {
    const auto* grad = static_cast<const decltype(g)*>(r.grad);
    if (r.lp == nullptr) return update_elements<Rule>(r, grad, static_cast<NoLp*>(nullptr), c);
    with_type(r.lp_dtype, [&](auto l) { update_elements<Rule>(r, grad, static_cast<decltype(l)*>(r.lp), c); });
  });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

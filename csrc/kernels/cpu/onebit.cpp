// 1-bit Adam and 0/1 Adam: the formulas of kernels/onebit.h, operation by operation, so that all widths agree bit for
// bit.
#include "kernels/onebit.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/onebit.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

// A vector of elements, and what they exchange.
template <class V>
struct Elements {
  V p, g, x, m, v, u, w;
};

template <class D, class V>
HWY_INLINE V root_of(D d, const Elements<V>& e, const OneBitConstants& c) {
  return Add(Mul(Sqrt(e.v), Set(d, c.inv_sqrt_correct)), Set(d, c.eps));
}

template <class D, class V>
HWY_INLINE V change_of(D d, const Elements<V>& e, const OneBitConstants& c) {
  return Add(Div(Mul(Set(d, c.step_size), e.m), root_of(d, e, c)), Mul(Set(d, c.decay), e.p));
}

template <class D, class V>
HWY_INLINE void local_step(D d, Elements<V>& e, const OneBitConstants& c) {
  e.m = Add(e.m, Mul(Set(d, c.move1), Sub(e.g, e.m)));
  const V change = change_of(d, e, c);
  e.p = Sub(e.p, change);
  e.u = Sub(e.u, change);
}

struct OneBitTake {
  template <class D, class V>
  static HWY_INLINE void step(D d, Elements<V>& e, const OneBitConstants& c) {
    e.m = c.gradients ? Add(e.m, Mul(Set(d, c.move1), Sub(e.x, e.m))) : e.x;
    e.p = Sub(e.p, change_of(d, e, c));
  }
};

struct ZeroOneLocal {
  template <class D, class V>
  static HWY_INLINE void step(D d, Elements<V>& e, const OneBitConstants& c) {
    local_step(d, e, c);
  }
};

struct ZeroOneSend {
  template <class D, class V>
  static HWY_INLINE void step(D d, Elements<V>& e, const OneBitConstants& c) {
    local_step(d, e, c);
    e.x = Mul(e.u, root_of(d, e, c));
  }
};

struct ZeroOneSync {
  template <class D, class V>
  static HWY_INLINE void step(D d, Elements<V>& e, const OneBitConstants& c) {
    if (c.lr_sum != 0) e.m = Neg(Div(e.x, Set(d, c.lr_sum)));
    e.p = Add(e.w, Div(e.x, root_of(d, e, c)));
    e.w = e.p;
    e.u = Zero(d);
  }
};

// kStates: those that are read, in the order m, v, u, w. Passes of kSends write x, passes of kTakes read it, and the
// others of both kinds read the gradient.
template <class Rule, int kStates, bool kSends, bool kTakes, class Grad, class Lp>
void onebit_elements(const UpdateRange& r, const Grad* grad, Lp* lp, OneBitConstants c) {
  float* const p = r.master;
  float *const m = r.states[0], *const v = r.states[1], *const u = r.states[2], *const w = r.states[3];
  float* const x = r.scratch;
  const float grad_scale = r.grad_scale;
  each_element(r.n, [&](auto d, size_t i) HWY_ATTR {
    Elements<Vec<decltype(d)>> e;
    e.p = load(d, p + i);
    e.g = kTakes ? Zero(d) : Mul(load(d, grad + i), Set(d, grad_scale));
    e.x = kTakes ? load(d, x + i) : Zero(d);
    e.m = load(d, m + i);
    e.v = load(d, v + i);
    e.u = kStates > 2 ? load(d, u + i) : Zero(d);
    e.w = kStates > 3 ? load(d, w + i) : Zero(d);
    Rule::step(d, e, c);
    store(d, e.m, m + i);
    if (kStates > 2) store(d, e.u, u + i);
    if (kStates > 3) store(d, e.w, w + i);
    if (kSends) store(d, e.x, x + i);
    store(d, e.p, p + i);
    store(d, e.p, lp + i);
  });
}

template <class Rule, int kStates, bool kSends, bool kTakes>
HWY_INLINE void onebit_all(const UpdateRange& r, const void* constants) {
  const auto& c = *static_cast<const OneBitConstants*>(constants);
  with_type(r.grad_dtype, [&](auto g) {
    const auto* grad = static_cast<const decltype(g)*>(r.grad);
    if (r.lp == nullptr) return onebit_elements<Rule, kStates, kSends, kTakes>(r, grad, static_cast<NoLp*>(nullptr), c);
    with_type(r.lp_dtype, [&](auto l) {
      onebit_elements<Rule, kStates, kSends, kTakes>(r, grad, static_cast<decltype(l)*>(r.lp), c);
    });
  });
}

template <class Grad>
void send_elements(const UpdateRange& r, const Grad* grad, OneBitConstants c) {
  const float* const m = r.states[0];
  float* const x = r.scratch;
  const float grad_scale = r.grad_scale;
  each_element(r.n, [&](auto d, size_t i) HWY_ATTR {
    const auto g = Mul(load(d, grad + i), Set(d, grad_scale));
    const auto old = load(d, m + i);
    store(d, c.gradients ? g : Add(old, Mul(Set(d, c.move1), Sub(g, old))), x + i);
  });
}

void onebit_send_range(const UpdateRange& r, const void* constants) {
  const auto& c = *static_cast<const OneBitConstants*>(constants);
  with_type(r.grad_dtype, [&](auto g) { send_elements(r, static_cast<const decltype(g)*>(r.grad), c); });
}
void onebit_take_range(const UpdateRange& r, const void* c) { onebit_all<OneBitTake, 2, false, true>(r, c); }
void zero_one_local_range(const UpdateRange& r, const void* c) { onebit_all<ZeroOneLocal, 3, false, false>(r, c); }
void zero_one_send_range(const UpdateRange& r, const void* c) { onebit_all<ZeroOneSend, 3, true, false>(r, c); }
void zero_one_sync_range(const UpdateRange& r, const void* c) { onebit_all<ZeroOneSync, 4, false, true>(r, c); }

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/update.h"

namespace ds::kernels {
DS_CPU_UPDATE("onebit_send", 1, OneBitConstants, onebit_send_range);
DS_CPU_UPDATE("onebit_take", 2, OneBitConstants, onebit_take_range);
DS_CPU_UPDATE("zero_one_local", 3, OneBitConstants, zero_one_local_range);
DS_CPU_UPDATE("zero_one_send", 3, OneBitConstants, zero_one_send_range);
DS_CPU_UPDATE("zero_one_sync", 4, OneBitConstants, zero_one_sync_range);
}  // namespace ds::kernels
#endif

// Lion: the formulas of kernels/lion.h.
#include "kernels/lion.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/lion.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

struct Lion {
  using Constants = LionConstants;
  static constexpr int kStates = 1;

  template <class D, class V>
  static HWY_INLINE void step(D d, V& p, V* s, V g, const Constants& k) {
    const V away = Sub(g, s[0]), zero = Zero(d), lr = Set(d, k.lr);
    const V c = Add(s[0], Mul(Set(d, k.move1), away));
    const V up = IfThenElseZero(Gt(c, zero), lr);
    const V down = IfThenElseZero(Lt(c, zero), lr);
    const V signed_lr = IfThenElse(Eq(c, c), Sub(up, down), c);
    p = Sub(p, Add(signed_lr, Mul(Set(d, k.decay), p)));
    s[0] = Add(s[0], Mul(Set(d, k.move2), away));
  }
};

void lion_range(const UpdateRange& range, const void* constants) { update_all<Lion>(range, constants); }

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/update.h"

namespace ds::kernels {
DS_CPU_UPDATE("lion", 1, LionConstants, lion_range);
}  // namespace ds::kernels
#endif

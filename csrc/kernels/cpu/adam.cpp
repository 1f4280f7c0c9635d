// Adam: the formulas of kernels/adam.h, operation by operation, so that all widths agree bit for bit.
#include "kernels/adam.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/adam.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

struct Adam {
  using Constants = AdamConstants;
  static constexpr int kStates = 2;

  template <class D, class V>
  static HWY_INLINE void step(D d, V& p, V* s, V g, const Constants& c) {
    V first = s[0], second = s[1];
    g = Add(g, Mul(Set(d, c.decay_grad), p));
    first = Add(first, Mul(Set(d, c.move1), Sub(g, first)));
    second = Add(second, Mul(Set(d, c.move2), Sub(Mul(g, g), second)));
    const V root = Add(Mul(Sqrt(second), Set(d, c.inv_sqrt_correct)), Set(d, c.eps));
    V change = Div(Mul(Set(d, c.step_size), first), root);
    change = Add(change, Mul(Set(d, c.decay_param), p));
    p = Sub(p, change);
    s[0] = first;
    s[1] = second;
  }
};

void adam_range(const UpdateRange& range, const void* constants) { update_all<Adam>(range, constants); }

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/update.h"

namespace ds::kernels {
DS_CPU_UPDATE("adam", 2, AdamConstants, adam_range);
}  // namespace ds::kernels
#endif

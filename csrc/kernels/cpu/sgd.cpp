// SGD: the formulas of kernels/sgd.h.
#include "kernels/sgd.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sgd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

struct Sgd {
  using Constants = SgdConstants;
  static constexpr int kStates = 1;

  template <class D, class V>
  static HWY_INLINE void step(D d, V& p, V* s, V g, const Constants& c) {
    g = Add(g, Mul(Set(d, c.weight_decay), p));
    if (c.buffered) {
      const V change = Sub(Mul(Set(d, c.gain), g), Mul(Set(d, c.leak), s[0]));
      s[0] = Add(s[0], change);
      g = c.look_ahead != 0 ? Add(g, Mul(Set(d, c.look_ahead), s[0])) : s[0];
    }
    p = Sub(p, Mul(Set(d, c.lr), g));
  }
};

void sgd_range(const UpdateRange& range, const void* constants) { update_all<Sgd>(range, constants); }

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/update.h"

namespace ds::kernels {
DS_CPU_UPDATE("sgd", 1, SgdConstants, sgd_range);
}  // namespace ds::kernels
#endif

// Adagrad: the formulas of kernels/adagrad.h.
#include "kernels/adagrad.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/adagrad.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

struct Adagrad {
  using Constants = AdagradConstants;
  static constexpr int kStates = 1;

  template <class D, class V>
  static HWY_INLINE void step(D d, V& p, V* s, V g, const Constants& c) {
    g = Add(g, Mul(Set(d, c.weight_decay), p));
    s[0] = Add(s[0], Mul(g, g));
    const V root = Add(Sqrt(s[0]), Set(d, c.eps));
    p = Sub(p, Div(Mul(Set(d, c.lr), g), root));
  }
};

void adagrad_range(const UpdateRange& range, const void* constants) { update_all<Adagrad>(range, constants); }

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/update.h"

namespace ds::kernels {
DS_CPU_UPDATE("adagrad", 1, AdagradConstants, adagrad_range);
}  // namespace ds::kernels
#endif

// The element-wise halves of Muon: the formulas of kernels/muon.h, operation by operation, so that all widths agree bit
// for bit.
#include "kernels/muon.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/muon.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

template <class Grad>
void momentum_elements(const UpdateRange& r, const Grad* grad, MuonConstants c) {
  float *const m = r.states[0], *const out = r.scratch;
  const float grad_scale = r.grad_scale;
  each_element(r.n, [&](auto d, size_t i) HWY_ATTR {
    const auto g = Mul(load(d, grad + i), Set(d, grad_scale));
    auto momentum = load(d, m + i);
    momentum = Add(momentum, Mul(Set(d, c.move), Sub(g, momentum)));
    store(d, momentum, m + i);
    if (c.nesterov) momentum = Add(g, Mul(Set(d, c.beta), Sub(momentum, g)));
    store(d, momentum, out + i);
  });
}

void muon_momentum_range(const UpdateRange& r, const void* constants) {
  const auto& c = *static_cast<const MuonConstants*>(constants);
  with_type(r.grad_dtype, [&](auto g) { momentum_elements(r, static_cast<const decltype(g)*>(r.grad), c); });
}

template <class Lp>
void weight_elements(const UpdateRange& r, Lp* lp, MuonConstants c) {
  float* const p = r.master;
  const float* const update = r.scratch;
  each_element(r.n, [&](auto d, size_t i) HWY_ATTR {
    const auto old = load(d, p + i);
    const auto change = Add(Mul(Set(d, c.lr), load(d, update + i)), Mul(Set(d, c.decay), old));
    const auto next = Sub(old, change);
    store(d, next, p + i);
    store(d, next, lp + i);
  });
}

void muon_range(const UpdateRange& r, const void* constants) {
  const auto& c = *static_cast<const MuonConstants*>(constants);
  if (r.lp == nullptr) return weight_elements(r, static_cast<NoLp*>(nullptr), c);
  with_type(r.lp_dtype, [&](auto l) { weight_elements(r, static_cast<decltype(l)*>(r.lp), c); });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/update.h"

namespace ds::kernels {
DS_CPU_UPDATE("muon_momentum", 1, MuonConstants, muon_momentum_range);
DS_CPU_UPDATE("muon", 0, MuonConstants, muon_range);
}  // namespace ds::kernels
#endif

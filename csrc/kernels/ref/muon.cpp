// Plain loops of Muon.
#include "kernels/muon.h"

#include "kernels/ref/element.h"
#include "kernels/ref/update.h"

namespace ds::kernels::ref {
namespace {

void momentum(const UpdateSegment* segments, size_t count, const UpdateArgs& args, float grad_scale) {
  const auto& c = *static_cast<const MuonConstants*>(args.constants);
  for (const UpdateSegment* seg = segments; seg != segments + count; ++seg) {
    for (size_t i = 0; i < seg->numel; ++i) {
      const float g = static_cast<float>(load(seg->grad, args.grad_dtype, i)) * grad_scale;
      float m = static_cast<float>(load(seg->states[0], args.state_dtype, i));
      m = m + c.move * (g - m);
      store_rounded(seg->states[0], args.state_dtype, i, m, args, seg->stream, 1);
      seg->scratch[i] = c.nesterov ? g + c.beta * (m - g) : m;
    }
  }
}

void update(const UpdateSegment* segments, size_t count, const UpdateArgs& args, float) {
  const auto& c = *static_cast<const MuonConstants*>(args.constants);
  for (const UpdateSegment* seg = segments; seg != segments + count; ++seg) {
    for (size_t i = 0; i < seg->numel; ++i) {
      float p = static_cast<float>(load(seg->master, args.master_dtype, i));
      const float change = c.lr * seg->scratch[i] + c.decay * p;
      p = p - change;
      store_rounded(seg->master, args.master_dtype, i, p, args, seg->stream, 0);
      if (seg->lp != nullptr) store(seg->lp, args.lp_dtype, i, p);
    }
  }
}

const Registration momentum_registration("muon_momentum", &momentum);
const Registration update_registration("muon", &update);

}  // namespace
}  // namespace ds::kernels::ref

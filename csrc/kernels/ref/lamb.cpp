// Plain loops of LAMB.
#include "kernels/lamb.h"

#include <vector>

#include "kernels/ref/element.h"
#include "kernels/ref/sum_squares_of.h"
#include "kernels/ref/update.h"

namespace ds::kernels::ref {
namespace {

float direction(float p, float m, float v, const LambConstants& c) {
  const float root = std::sqrt(v + c.eps_inside) + c.eps_outside;
  return m / root + c.decay * p;
}

void moments(const UpdateSegment* segments, size_t count, const UpdateArgs& args, float grad_scale) {
  const auto& c = *static_cast<const LambConstants*>(args.constants);
  for (const UpdateSegment* seg = segments; seg != segments + count; ++seg) {
    std::vector<float> masters(seg->numel), updates(seg->numel);
    for (size_t i = 0; i < seg->numel; ++i) {
      const float p = static_cast<float>(load(seg->master, args.master_dtype, i));
      const float g = static_cast<float>(load(seg->grad, args.grad_dtype, i)) * grad_scale;
      float m = static_cast<float>(load(seg->states[0], args.state_dtype, i));
      float v = static_cast<float>(load(seg->states[1], args.state_dtype, i));
      m = m + c.move1 * (g - m);
      v = v + c.move2 * (g * g - v);
      store_rounded(seg->states[0], args.state_dtype, i, m, args, seg->stream, 1);
      store_rounded(seg->states[1], args.state_dtype, i, v, args, seg->stream, 2);
      masters[i] = p;
      updates[i] = direction(p, m, v, c);
    }
    seg->sums[0] += sum_squares_of(masters);
    seg->sums[1] += sum_squares_of(updates);
  }
}

void update(const UpdateSegment* segments, size_t count, const UpdateArgs& args, float) {
  const auto& c = *static_cast<const LambConstants*>(args.constants);
  for (const UpdateSegment* seg = segments; seg != segments + count; ++seg) {
    const float rate = c.rate * static_cast<float>(lamb_ratio(seg->sums, c.min_ratio, c.max_ratio));
    for (size_t i = 0; i < seg->numel; ++i) {
      float p = static_cast<float>(load(seg->master, args.master_dtype, i));
      const float m = static_cast<float>(load(seg->states[0], args.state_dtype, i));
      const float v = static_cast<float>(load(seg->states[1], args.state_dtype, i));
      const float change = rate * direction(p, m, v, c);
      p = p - change;
      store_rounded(seg->master, args.master_dtype, i, p, args, seg->stream, 0);
      if (seg->lp != nullptr) store(seg->lp, args.lp_dtype, i, p);
    }
  }
}

const Registration moments_registration("lamb_moments", &moments);
const Registration update_registration("lamb", &update);

}  // namespace
}  // namespace ds::kernels::ref

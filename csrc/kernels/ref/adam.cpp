#include <cmath>

#include "kernels/adam_math.h"
#include "kernels/ref/element.h"
#include "kernels/ref/ref.h"

namespace ds::kernels::ref {

void adam(const Launch&, const AdamSegment* segments, size_t count, const AdamArgs& args, const StepScale* scale) {
  if (scale != nullptr && scale->skip) return;
  const AdamConstants c = adam_constants(args, scale != nullptr ? scale->grad_scale : 1.0f);
  for (size_t s = 0; s < count; ++s) {
    const AdamSegment& seg = segments[s];
    for (size_t i = 0; i < seg.numel; ++i) {
      float p = static_cast<float>(load(seg.master, args.master_dtype, i));
      float m = static_cast<float>(load(seg.exp_avg, args.state_dtype, i));
      float v = static_cast<float>(load(seg.exp_avg_sq, args.state_dtype, i));
      float g = static_cast<float>(load(seg.grad, args.grad_dtype, i)) * c.grad_scale;
      g = g + c.decay_grad * p;
      m = m + c.move1 * (g - m);
      v = v + c.move2 * (g * g - v);
      float d = c.step_size * m / (std::sqrt(v) * c.inv_sqrt_correct + c.eps);
      d = d + c.decay_param * p;
      p = p - d;
      store(seg.master, args.master_dtype, i, p);
      store(seg.exp_avg, args.state_dtype, i, m);
      store(seg.exp_avg_sq, args.state_dtype, i, v);
      if (seg.lp != nullptr) store(seg.lp, args.lp_dtype, i, p);
    }
  }
}

}  // namespace ds::kernels::ref

// Plain loops of 1-bit LAMB.
#include "kernels/onebit_lamb.h"

#include <algorithm>
#include <vector>

#include "kernels/ref/element.h"
#include "kernels/ref/sum_squares_of.h"
#include "kernels/ref/update.h"

namespace ds::kernels::ref {
namespace {

using namespace onebit_lamb;

const OneBitLambConstants& constants_of(const UpdateArgs& args) {
  return *static_cast<const OneBitLambConstants*>(args.constants);
}

float root_of(float v, const LambConstants& c) { return std::sqrt(v + c.eps_inside) + c.eps_outside; }

float state(const UpdateSegment& seg, int k, const UpdateArgs& args, size_t i) {
  return static_cast<float>(load(seg.states[k], args.state_dtype, i));
}

float weight(const UpdateSegment& seg, const UpdateArgs& args, size_t i) {
  return static_cast<float>(load(seg.master, args.master_dtype, i));
}

void size(const UpdateSegment* segments, size_t count, const UpdateArgs& args, float) {
  for (const UpdateSegment* seg = segments; seg != segments + count; ++seg) {
    std::vector<float> moments;
    for (size_t i = 0; i < seg->numel; ++i) moments.push_back(state(*seg, 0, args, i));
    seg->sums[0] += sum_squares_of(moments);
  }
}

void send(const UpdateSegment* segments, size_t count, const UpdateArgs& args, float grad_scale) {
  const LambConstants& c = constants_of(args).lamb;
  for (const UpdateSegment* seg = segments; seg != segments + count; ++seg) {
    const float scaling = static_cast<float>(seg->sums[kScaling]);
    for (size_t i = 0; i < seg->numel; ++i) {
      const float g = static_cast<float>(load(seg->grad, args.grad_dtype, i)) * grad_scale;
      const float m = state(*seg, 0, args, i);
      seg->scratch[i] = (m + c.move1 * (g - m)) * scaling;
    }
  }
}

void moments(const UpdateSegment* segments, size_t count, const UpdateArgs& args, float) {
  const OneBitLambConstants& all = constants_of(args);
  const LambConstants& c = all.lamb;
  for (const UpdateSegment* seg = segments; seg != segments + count; ++seg) {
    const float scaling = static_cast<float>(seg->sums[kScaling]);
    std::vector<float> directions, updates;
    for (size_t i = 0; i < seg->numel; ++i) {
      const float p = weight(*seg, args, i), m = state(*seg, 0, args, i), v = state(*seg, 1, args, i);
      const float next = seg->scratch[i] / scaling;
      const float h = m + (next - m) / c.move1;
      float f = all.begins ? v : state(*seg, 2, args, i);
      f = f + c.move2 * (h * h - f);
      store_rounded(seg->states[0], args.state_dtype, i, next, args, seg->stream, 1);
      store_rounded(seg->states[2], args.state_dtype, i, f, args, seg->stream, 3);
      const float root = root_of(v, c);
      directions.push_back(next / root);
      updates.push_back(directions.back() + c.decay * p);
      seg->sums[2] = std::max(seg->sums[2], static_cast<double>(root / root_of(f, c)));
    }
    seg->sums[0] += sum_squares_of(directions);
    seg->sums[1] += sum_squares_of(updates);
  }
}

void update(const UpdateSegment* segments, size_t count, const UpdateArgs& args, float) {
  const LambConstants& c = constants_of(args).lamb;
  for (const UpdateSegment* seg = segments; seg != segments + count; ++seg) {
    const float rate = c.rate * static_cast<float>(seg->sums[kRatio]);
    for (size_t i = 0; i < seg->numel; ++i) {
      float p = weight(*seg, args, i);
      const float u = state(*seg, 0, args, i) / root_of(state(*seg, 1, args, i), c) + c.decay * p;
      p = p - rate * u;
      store_rounded(seg->master, args.master_dtype, i, p, args, seg->stream, 0);
      if (seg->lp != nullptr) store(seg->lp, args.lp_dtype, i, p);
    }
  }
}

template <auto kNumbersOf>
void numbers(const UpdateSegment* segments, size_t count, const UpdateArgs& args, float) {
  for (const UpdateSegment* seg = segments; seg != segments + count; ++seg)
    if (seg->numel != 0) kNumbersOf(seg->sums, constants_of(args));
}

const Registration size_registration("onebit_lamb_size", &size);
const Registration send_registration("onebit_lamb_send", &send);
const Registration moments_registration("onebit_lamb_moments", &moments);
const Registration update_registration("onebit_lamb", &update);
const Registration coeff_registration("onebit_lamb_coeff", &numbers<&average_lamb_ratio>);
const Registration factor_registration("onebit_lamb_factor", &numbers<&factor_of_lamb>);

}  // namespace
}  // namespace ds::kernels::ref

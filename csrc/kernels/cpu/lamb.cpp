// LAMB: the formulas of kernels/lamb.h, operation by operation, so that all widths agree bit for bit; sums in the order
// of [Note: order of the sum of squares] in kernels/sum_order.h.
#include "kernels/lamb.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/lamb.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/lamb_blocks.h"
#include "kernels/cpu/squares-inl.h"
#include "kernels/cpu/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

template <class D, class V>
HWY_INLINE V direction(D d, V p, V m, V v, const LambConstants& c) {
  const V root = Add(Sqrt(Add(v, Set(d, c.eps_inside))), Set(d, c.eps_outside));
  return Add(Div(m, root), Mul(Set(d, c.decay), p));
}

template <class Grad>
void moments_elements(const UpdateRange& r, const Grad* grad, LambConstants c, float* update) {
  const float* const p = r.master;
  float *const m = r.states[0], *const v = r.states[1];
  const float grad_scale = r.grad_scale;
  each_element(r.n, [&](auto d, size_t i) HWY_ATTR {
    const auto g = Mul(load(d, grad + i), Set(d, grad_scale));
    auto first = load(d, m + i);
    auto second = load(d, v + i);
    first = Add(first, Mul(Set(d, c.move1), Sub(g, first)));
    second = Add(second, Mul(Set(d, c.move2), Sub(Mul(g, g), second)));
    store(d, first, m + i);
    store(d, second, v + i);
    store(d, direction(d, load(d, p + i), first, second, c), update + i);
  });
}

void lamb_moments_range(const UpdateRange& r, const void* constants) {
  auto& block = **static_cast<LambBlock* const*>(constants);
  with_type(r.grad_dtype, [&](auto g) {
    moments_elements(r, static_cast<const decltype(g)*>(r.grad), *block.constants, block.update);
  });
  add_squares(r.master, r.n, block.master_lanes);
  add_squares(block.update, r.n, block.update_lanes);
}

template <class Lp>
void weight_elements(const UpdateRange& r, Lp* lp, LambConstants c, float rate) {
  float* const p = r.master;
  const float *const m = r.states[0], *const v = r.states[1];
  each_element(r.n, [&](auto d, size_t i) HWY_ATTR {
    const auto old = load(d, p + i);
    const auto change = Mul(Set(d, rate), direction(d, old, load(d, m + i), load(d, v + i), c));
    const auto next = Sub(old, change);
    store(d, next, p + i);
    store(d, next, lp + i);
  });
}

void lamb_range(const UpdateRange& r, const void* constants) {
  const auto& rated = *static_cast<const LambRate*>(constants);
  if (r.lp == nullptr) return weight_elements(r, static_cast<NoLp*>(nullptr), *rated.constants, rated.rate);
  with_type(r.lp_dtype,
            [&](auto l) { weight_elements(r, static_cast<decltype(l)*>(r.lp), *rated.constants, rated.rate); });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>

#include "kernels/cpu/split.h"
#include "kernels/cpu/sum_blocks.h"
#include "kernels/cpu/update.h"

namespace ds::kernels::cpu {
namespace {

static_assert(kSumBlock % LambBlock::kTile == 0 && LambBlock::kTile % kSumLanes == 0, "tiles continue their lanes");

// States of one block of a segment, and its sums.
SumPair moments_block(Isa isa, UpdateSegment segment, size_t begin, size_t end, UpdateArgs args, float grad_scale) {
  LambBlock block;
  block.constants = static_cast<const LambConstants*>(args.constants);
  LambBlock* const given = &block;
  args.constants = &given;
  segment.lp = nullptr;
  for (; begin < end; begin += LambBlock::kTile) {
    update_range(isa, segment, begin, std::min(end, begin + LambBlock::kTile), args, 2, grad_scale,
                 DS_BODY(lamb_moments_range, isa));
  }
  return {sum_of_lanes(block.master_lanes), sum_of_lanes(block.update_lanes)};
}

void moments(const Launch& launch, Isa isa, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
             const StepScale& scale) {
  for_sum_blocks<SumPair>(
      launch, segments, count,
      [&](size_t s, size_t begin, size_t end) {
        return moments_block(isa, segments[s], begin, end, args, scale.grad_scale);
      },
      [&](size_t s, const SumPair* blocks, size_t number) { add_pairs(blocks, number, segments[s].sums); });
}

void weights(const Launch& launch, Isa isa, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
             const StepScale&) {
  const auto& c = *static_cast<const LambConstants*>(args.constants);
  split_segments(launch, segments, count, [&](size_t s, size_t begin, size_t end) {
    const double ratio = lamb_ratio(segments[s].sums, c.min_ratio, c.max_ratio);
    const LambRate rated = {&c, c.rate * static_cast<float>(ratio)};
    UpdateArgs own = args;
    own.constants = &rated;
    update_range(isa, segments[s], begin, end, own, 2, 1.0f, DS_BODY(lamb_range, isa));
  });
}

const UpdateRegistration moments_registration("lamb_moments", 2, sizeof(LambConstants), &moments);
const UpdateRegistration weights_registration("lamb", 2, sizeof(LambConstants), &weights);

}  // namespace
}  // namespace ds::kernels::cpu
#endif

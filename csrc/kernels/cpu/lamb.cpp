// LAMB: the formulas of kernels/lamb.h, operation by operation, so that all widths agree bit for bit; sums in the order
// of [Note: order of the sum of squares] in kernels/sum_order.h.
#include "kernels/lamb.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/lamb.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/lamb_blocks.h"
#include "kernels/cpu/update-inl.h"
#include "kernels/sum_order.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

template <class D, class V>
HWY_INLINE V direction(D d, V p, V m, V v, const LambConstants& c) {
  const V root = Add(Sqrt(Add(v, Set(d, c.eps_inside))), Set(d, c.eps_outside));
  return Add(Div(m, root), Mul(Set(d, c.decay), p));
}

// Adds the squares of x[i] to lanes[i % kSumLanes], in increasing i.
inline void add_squares(const float* x, size_t n, double* lanes) {
  const ScalableTag<double> d;
  const Rebind<float, decltype(d)> narrow;
  constexpr size_t kWidth = MaxLanes(ScalableTag<double>());
  constexpr size_t kRegisters = kSumLanes / kWidth;
  Vec<decltype(d)> sums[kRegisters];
  for (size_t r = 0; r < kRegisters; ++r) sums[r] = LoadU(d, lanes + r * kWidth);
  size_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes) {
#pragma GCC unroll 16
    for (size_t r = 0; r < kRegisters; ++r) {
      const auto wide = PromoteTo(d, LoadU(narrow, x + i + r * kWidth));
      sums[r] = MulAdd(wide, wide, sums[r]);  // the square is exact: fused or not, the sum is rounded once
    }
  }
  for (size_t r = 0; r < kRegisters; ++r) StoreU(sums[r], d, lanes + r * kWidth);
  for (size_t lane = 0; i < n; ++i, ++lane) lanes[lane] += static_cast<double>(x[i]) * x[i];
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
#include <vector>

#include "kernels/cpu/split.h"
#include "kernels/cpu/update.h"

namespace ds::kernels::cpu {
namespace {

static_assert(kSumBlock % LambBlock::kTile == 0 && LambBlock::kTile % kSumLanes == 0, "tiles continue their lanes");

struct Sums {
  double master, update;
};

// States of one block of a segment, and its sums.
Sums moments_block(Isa isa, UpdateSegment segment, size_t begin, size_t end, UpdateArgs args, float grad_scale) {
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

// The sums of a segment's blocks, added as kernels/sum_order.h says; lanes that no block reaches are zero and would
// change nothing.
Sums sum_of_blocks(const Sums* blocks, size_t count) {
  if (count == 1) return blocks[0];
  double master[kSumBlockLanes] = {}, update[kSumBlockLanes] = {};
  for (size_t b = 0; b < count; ++b) {
    master[b % kSumBlockLanes] += blocks[b].master;
    update[b % kSumBlockLanes] += blocks[b].update;
  }
  return {sum_of_lanes(master), sum_of_lanes(update)};
}

void moments(const Launch& launch, Isa isa, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
             const StepScale& scale) {
  std::vector<size_t> ends(count);  // of each segment, in the row of all blocks
  size_t blocks = 0, total = 0;
  for (size_t s = 0; s < count; ++s) {
    ends[s] = blocks += sum_blocks(segments[s].numel);
    total += segments[s].numel;
  }
  std::vector<Sums> found(blocks);
  const auto run = [&](size_t begin, size_t end) {
    size_t s = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (size_t b = begin; b < end; ++b) {
      while (b >= ends[s]) ++s;
      const size_t first = (b - (s == 0 ? 0 : ends[s - 1])) * kSumBlock;
      found[b] = moments_block(isa, segments[s], first, std::min(segments[s].numel, first + kSumBlock), args,
                               scale.grad_scale);
    }
  };
  if (launch.pool == nullptr || total <= kInline) {
    run(0, blocks);
  } else {
    launch.pool->parallel_for(blocks, 1, run);
  }
  for (size_t s = 0, begin = 0; s < count; begin = ends[s++]) {
    if (segments[s].numel == 0) continue;
    const Sums sum = sum_of_blocks(found.data() + begin, ends[s] - begin);
    segments[s].sums[0] += sum.master;
    segments[s].sums[1] += sum.update;
  }
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

// 1-bit LAMB: the formulas of kernels/onebit_lamb.h, operation by operation, so that all widths agree bit for bit; sums
// in the order of [Note: order of the sum of squares] in kernels/sum_order.h.
#include "kernels/onebit_lamb.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/onebit_lamb.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/onebit_lamb_blocks.h"
#include "kernels/cpu/squares-inl.h"
#include "kernels/cpu/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

template <class D, class V>
HWY_INLINE V onebit_root(D d, V v, const LambConstants& c) {
  return Add(Sqrt(Add(v, Set(d, c.eps_inside))), Set(d, c.eps_outside));
}

void onebit_lamb_size_range(const UpdateRange& r, const void* constants) {
  add_squares(r.states[0], r.n, (**static_cast<OneBitLambBlock* const*>(constants)).direction_lanes);
}

template <class Grad>
void onebit_lamb_send_elements(const UpdateRange& r, const Grad* grad, LambConstants c, float scaling) {
  const float* const m = r.states[0];
  float* const x = r.scratch;
  const float grad_scale = r.grad_scale;
  each_element(r.n, [&](auto d, size_t i) HWY_ATTR {
    const auto g = Mul(load(d, grad + i), Set(d, grad_scale));
    const auto old = load(d, m + i);
    store(d, Mul(Add(old, Mul(Set(d, c.move1), Sub(g, old))), Set(d, scaling)), x + i);
  });
}

void onebit_lamb_send_range(const UpdateRange& r, const void* constants) {
  const auto& one = *static_cast<const OneBitLambNumber*>(constants);
  with_type(r.grad_dtype, [&](auto g) {
    onebit_lamb_send_elements(r, static_cast<const decltype(g)*>(r.grad), one.constants->lamb, one.number);
  });
}

void onebit_lamb_moments_range(const UpdateRange& r, const void* constants) {
  auto& block = **static_cast<OneBitLambBlock* const*>(constants);
  const LambConstants c = block.constants->lamb;
  const bool begins = block.constants->begins;
  const float scaling = block.scaling;
  const float *const p = r.master, *const x = r.scratch, *const v = r.states[1];
  float *const m = r.states[0], *const f = r.states[2];
  float ratios[OneBitLambBlock::kTile];
  each_element(r.n, [&](auto d, size_t i) HWY_ATTR {
    const auto old = load(d, m + i), second = load(d, v + i);
    const auto next = Div(load(d, x + i), Set(d, scaling));
    const auto grad = Add(old, Div(Sub(next, old), Set(d, c.move1)));
    auto fresh = begins ? second : load(d, f + i);
    fresh = Add(fresh, Mul(Set(d, c.move2), Sub(Mul(grad, grad), fresh)));
    store(d, next, m + i);
    store(d, fresh, f + i);
    const auto root = onebit_root(d, second, c);
    const auto direction = Div(next, root);
    store(d, direction, block.direction + i);
    store(d, Add(direction, Mul(Set(d, c.decay), load(d, p + i))), block.update + i);
    store(d, Div(root, onebit_root(d, fresh, c)), ratios + i);
  });
  float largest = block.largest;
  for (size_t i = 0; i < r.n; ++i) largest = largest < ratios[i] ? ratios[i] : largest;
  block.largest = largest;
  add_squares(block.direction, r.n, block.direction_lanes);
  add_squares(block.update, r.n, block.update_lanes);
}

template <class Lp>
void onebit_lamb_elements(const UpdateRange& r, Lp* lp, LambConstants c, float rate) {
  float* const p = r.master;
  const float *const m = r.states[0], *const v = r.states[1];
  each_element(r.n, [&](auto d, size_t i) HWY_ATTR {
    const auto old = load(d, p + i);
    const auto update = Add(Div(load(d, m + i), onebit_root(d, load(d, v + i), c)), Mul(Set(d, c.decay), old));
    const auto next = Sub(old, Mul(Set(d, rate), update));
    store(d, next, p + i);
    store(d, next, lp + i);
  });
}

void onebit_lamb_range(const UpdateRange& r, const void* constants) {
  const auto& one = *static_cast<const OneBitLambNumber*>(constants);
  const LambConstants& c = one.constants->lamb;
  if (r.lp == nullptr) return onebit_lamb_elements(r, static_cast<NoLp*>(nullptr), c, one.number);
  with_type(r.lp_dtype, [&](auto l) { onebit_lamb_elements(r, static_cast<decltype(l)*>(r.lp), c, one.number); });
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

using namespace onebit_lamb;

const OneBitLambConstants& constants_of(const UpdateArgs& args) {
  return *static_cast<const OneBitLambConstants*>(args.constants);
}

struct LambSums : SumPair {
  float largest;
};

// One block of a segment by `body`, tile by tile, and its sums.
LambSums sums_of_block(Isa isa, UpdateSegment segment, size_t begin, size_t end, UpdateArgs args, int states,
                       UpdateBody body) {
  OneBitLambBlock block;
  block.constants = &constants_of(args);
  block.scaling = static_cast<float>(segment.sums[kScaling]);
  OneBitLambBlock* const given = &block;
  args.constants = &given;
  segment.lp = nullptr;
  for (; begin < end; begin += OneBitLambBlock::kTile)
    update_range(isa, segment, begin, std::min(end, begin + OneBitLambBlock::kTile), args, states, 1.0f, body);
  LambSums sums;
  sums.first = sum_of_lanes(block.direction_lanes);
  sums.second = sum_of_lanes(block.update_lanes);
  sums.largest = block.largest;
  return sums;
}

void size(const Launch& launch, Isa isa, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
          const StepScale&) {
  for_sum_blocks<LambSums>(
      launch, segments, count,
      [&](size_t s, size_t begin, size_t end) {
        return sums_of_block(isa, segments[s], begin, end, args, 1, DS_BODY(onebit_lamb_size_range, isa));
      },
      [&](size_t s, const LambSums* blocks, size_t number) { add_pairs(blocks, number, segments[s].sums); });
}

void moments(const Launch& launch, Isa isa, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
             const StepScale&) {
  for_sum_blocks<LambSums>(
      launch, segments, count,
      [&](size_t s, size_t begin, size_t end) {
        return sums_of_block(isa, segments[s], begin, end, args, 3, DS_BODY(onebit_lamb_moments_range, isa));
      },
      [&](size_t s, const LambSums* blocks, size_t number) {
        double* const sums = segments[s].sums;
        add_pairs(blocks, number, sums);
        for (size_t b = 0; b < number; ++b) sums[2] = std::max(sums[2], static_cast<double>(blocks[b].largest));
      });
}

// Elements by `body`, with a number of their segment.
template <typename Number>
void by_number(const Launch& launch, Isa isa, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
               int states, float grad_scale, UpdateBody body, const Number& number_of) {
  split_segments(launch, segments, count, [&](size_t s, size_t begin, size_t end) {
    const OneBitLambNumber given = {&constants_of(args), number_of(segments[s].sums)};
    UpdateArgs own = args;
    own.constants = &given;
    update_range(isa, segments[s], begin, end, own, states, grad_scale, body);
  });
}

void send(const Launch& launch, Isa isa, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
          const StepScale& scale) {
  by_number(launch, isa, segments, count, args, 1, scale.grad_scale, DS_BODY(onebit_lamb_send_range, isa),
            [](const double* sums) { return static_cast<float>(sums[kScaling]); });
}

void weights(const Launch& launch, Isa isa, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
             const StepScale&) {
  const float rate = constants_of(args).lamb.rate;
  by_number(launch, isa, segments, count, args, 2, 1.0f, DS_BODY(onebit_lamb_range, isa),
            [&](const double* sums) { return rate * static_cast<float>(sums[kRatio]); });
}

template <auto kNumbersOf>
void numbers(const Launch&, Isa, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
             const StepScale&) {
  for (size_t s = 0; s < count; ++s)
    if (segments[s].numel != 0) kNumbersOf(segments[s].sums, constants_of(args));
}

constexpr size_t kBytes = sizeof(OneBitLambConstants);
const UpdateRegistration size_registration("onebit_lamb_size", 1, kBytes, &size);
const UpdateRegistration send_registration("onebit_lamb_send", 1, kBytes, &send);
const UpdateRegistration moments_registration("onebit_lamb_moments", 3, kBytes, &moments);
const UpdateRegistration weights_registration("onebit_lamb", 2, kBytes, &weights);
const UpdateRegistration coeff_registration("onebit_lamb_coeff", 0, kBytes, &numbers<&average_lamb_ratio>);
const UpdateRegistration factor_registration("onebit_lamb_factor", 0, kBytes, &numbers<&factor_of_lamb>);

}  // namespace
}  // namespace ds::kernels::cpu
#endif

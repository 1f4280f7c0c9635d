// Gradients of the biases of attention (kernels/attention.h), in tiles: see attention-inl.h. Whoever computes a part of
// a gradient adds up all queries and keys that share it, one after the other.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_bias.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention_gradient-inl.h"

#ifndef DS_KERNELS_CPU_ATTENTION_BIAS_PART
#define DS_KERNELS_CPU_ATTENTION_BIAS_PART
namespace ds::kernels::cpu {
// Queries of one head that share the rows `out` of the gradient of a bias, [rows or 1, keys or 1].
struct BiasPart {
  int64_t batch, head;
  QueryGroup rows;
  BiasSizes sizes;
  float* out;
};
}  // namespace ds::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

// Adds a panel of gradients of scores to the rows `out` of its queries; key number j of the tile is key start + j.
inline void add_to_bias(const BiasSizes& sizes, const float* grads, Seen seen, int64_t queries, int64_t start,
                        float* out, float* spare) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = seen.wide, keys = seen.end - seen.begin;
  if (keys <= 0) return;
  const float* from = grads + seen.begin * wide;
  if (sizes.keys == 1) {
    HWY_ALIGN float sums[cpu::kPadding];
    for (int64_t part = 0; part < wide; part += lanes) {
      auto sum = Zero(d);
      for (int64_t j = 0; j < keys; ++j) sum = Add(sum, LoadU(d, from + j * wide + part));
      StoreU(sum, d, sums + part);
    }
    for (int64_t i = 0; i < queries; ++i) out[sizes.queries == 1 ? 0 : i] += sums[i];
  } else if (sizes.queries == 1) {
    const auto count = static_cast<size_t>(queries), second = count > Lanes(d) ? count - Lanes(d) : 0;
    const auto left = FirstN(d, count), right = FirstN(d, second);  // the other lanes have no query
    for (int64_t j = 0; j < keys; ++j, from += wide) {
      const auto sum = Add(IfThenElseZero(left, LoadU(d, from)), IfThenElseZero(right, LoadU(d, from + lanes)));
      out[start + seen.begin + j] += GetLane(SumOfLanes(d, sum));
    }
  } else {
    pack(spare, from, keys, queries, wide, int64_t{1}, wide);  // a row of it: one query, and `wide` keys
    for (int64_t i = 0; i < queries; ++i, out += sizes.keys)
      for (int64_t j = 0; j < keys; j += wide) {
        const float* row = spare + (j / wide * queries + i) * wide;
        float* to = out + start + seen.begin + j;
        each_element(static_cast<size_t>(cpu::least(wide, keys - j)), [&](auto one, size_t k) HWY_ATTR {
          StoreU(Add(LoadU(one, to + k), LoadU(one, row + k)), one, to + k);
        });
      }
  }
}

int64_t bias_scratch(const AttentionShape& s) { return GradientPanels<float>::scratch(s); }

template <class T>
void bias_backward_of(const cpu::BackwardCall& call, const cpu::BiasPart& part, float* scratch) {
  cpu::Floats floats(scratch);
  GradientPanels<T> all(call, part.batch, part.head, part.rows, 1.0f, false, floats);
  while (all.next_tile([](const auto*, int64_t) {})) {
    for (int64_t p = 0; p < all.panels(); ++p) {
      Panel panel;
      if (!all.compute(p, panel)) continue;
      float* out = part.out + (part.sizes.queries == 1 ? 0 : panel.first * part.sizes.keys);
      for (int64_t r = 0; r < all.tile.runs(); ++r) {
        const cpu::KeysOfTile& run = all.tile.run(r);
        const Seen seen = all.tile.seen(panel.row, panel.count, run);
        add_to_bias(part.sizes, all.grads, seen, panel.count, run.key - run.at, out, all.spare);
      }
    }
  }
}

void attention_bias_backward(const cpu::BackwardCall& call, const cpu::BiasPart& part, float* scratch) {
  with_type(call.shape.dtype, [&](auto type) { bias_backward_of<decltype(type)>(call, part, scratch); });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <memory>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/split.h"
#include "kernels/ref/attention.h"

namespace ds::kernels::cpu {
namespace {

template <Isa isa>
void bias_backward(const Launch& launch, const AttentionShape& s, const AttentionOperand& query,
                   const AttentionOperand& key, const AttentionOperand& value, const AttentionOperand& grad,
                   const void* lse, const void* row_sum, int which, void* for_bias) {
  if (s.dtype == DType::kF64)
    return ref::attention_bias_backward(launch, s, query, key, value, grad, lse, row_sum, which, for_bias);
  const BiasSizes n = bias_sizes(s, which);
  const int64_t inner = s.bias[which].inner, outer = s.batch / inner;
  const QueryGroups groups(s, kGroupRows);
  const int64_t split = n.queries == 1 ? 1 : groups.count();  // tasks of one head
  const BackwardCall call = {
      s, query, key, value, grad, static_cast<const float*>(lse), static_cast<const float*>(row_sum)};
  float* out = static_cast<float*>(for_bias);
  std::fill(out, out + numel_of(n), 0.0f);
  const auto body = [&](size_t begin, size_t end) {
    const int64_t numel = DS_BODY(bias_scratch, isa)(s);
    std::unique_ptr<float[]> scratch(new float[numel]);
    for (size_t task = begin; task < end; ++task) {
      const int64_t number = static_cast<int64_t>(task) / split, h = number % n.heads, i = number / n.heads % n.inner,
                    o = number / n.heads / n.inner, part = static_cast<int64_t>(task) % split;
      // Numbers that share the part: from the own one to the end where the bias is the same for all.
      const auto last = [](int64_t own, int64_t length, int64_t all) { return length == 1 ? all : own + 1; };
      for (int64_t a = o; a < last(o, n.outer, outer); ++a)
        for (int64_t b = i; b < last(i, n.inner, inner); ++b)
          for (int64_t head = h; head < last(h, n.heads, s.heads); ++head)
            for (int64_t g = part; g < last(part, n.queries, groups.count()); ++g) {
              const QueryGroup rows = groups.group(g);
              float* own = out + (number * n.queries + (n.queries == 1 ? 0 : rows.row)) * n.keys;
              DS_BODY(attention_bias_backward, isa)(call, {a * inner + b, head, rows, n, own}, scratch.get());
            }
    }
  };
  const auto tasks = static_cast<size_t>(n.outer * n.inner * n.heads * split);
  if (tasks == 0 || s.batch == 0 || s.keys == 0) return;
  const bool alone = launch.pool == nullptr || multiplications(s) < kAttentionInline;
  alone ? body(0, tasks) : launch.pool->parallel_for(tasks, 1, body);
}

}  // namespace

const decltype(AttentionKernels::bias_backward) kAttentionBiasBackward[kIsaCount] = DS_ENTRIES(bias_backward);

}  // namespace ds::kernels::cpu
#endif

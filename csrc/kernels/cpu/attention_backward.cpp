// Gradients of attention from one block (kernels/attention.h), in tiles: see attention-inl.h. Scores are computed
// again.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_backward.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention_gradient-inl.h"

#ifndef DS_KERNELS_CPU_ATTENTION_GRADIENT_GROUP
#define DS_KERNELS_CPU_ATTENTION_GRADIENT_GROUP
namespace ds::kernels::cpu {
// Queries of one head, and where the gradients of these, and of the head's keys and values, grow.
struct GradientGroup {
  int64_t batch, head;
  QueryGroup rows;
  float *for_query, *for_key, *for_value;
};
}  // namespace ds::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

// out[keys of the tile][size] += scores[keys][panel] * rows[queries of the panel][size]; `rows` is packed by features.
inline void add_to_keys(float* out, int64_t size, const float* scores, Seen seen, const float* rows, int64_t queries,
                        float* packed) {
  const int64_t wide = seen.wide, keys = seen.end - seen.begin;
  pack(packed, scores + seen.begin * wide, keys, queries, wide, int64_t{1}, int64_t{kTileRows});
  for (int64_t f = 0; f < size; f += wide)
    for (int64_t r = 0; r < keys; r += kTileRows)
      add_panel_tile(packed + r * queries, rows + f * queries, queries, out + (seen.begin + r) * size + f, size,
                     cpu::least(kTileRows, keys - r), cpu::least(wide, size - f), wide, false);
}

int64_t backward_scratch(const AttentionShape& s) {
  const int64_t wide = panel_width(s), features = whole_rows(s.size);
  return GradientPanels<float>::scratch(s) + cpu::kGroupRows * (s.size + s.value_size + 2 * wide + features) +
         cpu::kKeyTile * features;
}

template <class T>
void backward_of(const cpu::BackwardCall& call, const cpu::GradientGroup& g, float* scratch) {
  const AttentionShape& s = call.shape;
  const int64_t wide = panel_width(s), features = whole_rows(s.size);
  const int64_t across_q = (s.size + wide - 1) / wide * wide, across_g = (s.value_size + wide - 1) / wide * wide;
  cpu::Floats floats(scratch);
  GradientPanels<T> all(call, g.batch, g.head, g.rows, s.scale, true, floats);
  const int64_t panels = all.panels(), count = g.rows.count;
  float *plain_rows = floats.take(cpu::kGroupRows * across_q), *plain_upper = floats.take(cpu::kGroupRows * across_g),
        *sums = floats.take(cpu::kGroupRows * features), *turned = floats.take(cpu::kKeyTile * features);
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t first = p * wide, own = cpu::least(wide, count - first), row = g.rows.row + first;
    pack(plain_rows + first * across_q, all.query() + row * call.query.token, s.size, own, int64_t{1}, call.query.token,
         wide);
    pack(plain_upper + first * across_g, all.grad() + row * call.grad.token, s.value_size, own, int64_t{1},
         call.grad.token, wide);
  }
  __builtin_memset(sums, 0, static_cast<size_t>(panels * wide * features) * sizeof(float));

  const auto turn = [&](const auto* x, int64_t token) {
    pack(turned, x, s.size, all.tile.keys(), int64_t{1}, token, int64_t{kTileRows});
  };
  while (all.next_tile(turn)) {
    for (int64_t p = 0; p < panels; ++p) {
      Panel panel;
      if (!all.compute(p, panel)) continue;
      for (int64_t r = 0; r < all.tile.runs(); ++r) {
        const cpu::KeysOfTile& run = all.tile.run(r);
        const Seen seen = all.tile.seen(panel.row, panel.count, run);
        const int64_t start = run.key - run.at;
        add_to_keys(g.for_value + start * s.value_size, s.value_size, all.scores, seen,
                    plain_upper + panel.first * across_g, panel.count, all.spare);
        add_to_keys(g.for_key + start * s.size, s.size, all.grads, seen, plain_rows + panel.first * across_q,
                    panel.count, all.spare);
      }
      multiply_keys(turned, all.grads, all.tile.keys(), sums + panel.first * features, s.size, panel.seen);
    }
  }
  for (int64_t p = 0; p < panels; ++p)
    pack(g.for_query + p * wide * s.size, sums + p * wide * features, s.size, cpu::least(wide, count - p * wide), wide,
         int64_t{1}, s.size);
}

void attention_backward(const cpu::BackwardCall& call, const cpu::GradientGroup& group, float* scratch) {
  with_type(call.shape.dtype, [&](auto type) { backward_of<decltype(type)>(call, group, scratch); });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/split.h"
#include "kernels/ref/attention.h"

namespace ds::kernels::cpu {
namespace {

// The groups of all query heads that read one key/value head, cut into runs that are computed side by side. What the
// second run and later ones find for keys and values waits in memory of its own, so that sums have one order.
struct Runs {
  int64_t heads, readers;
  QueryGroups of_head;
  int64_t groups, count;

  explicit Runs(const AttentionShape& s)
      : heads(s.batch * s.kv_heads), readers(s.heads / s.kv_heads), of_head(s, kGroupRows), groups(of_head.count()) {
    constexpr int64_t kEnough = 8;  // for a pool of threads; few, since each costs memory and a sum
    count = heads == 0 ? 0 : std::min(readers * groups, (kEnough + heads - 1) / heads);
  }
  int64_t begin(int64_t run) const { return run * readers * groups / count; }
};

template <Isa isa>
void backward(const Launch& launch, const AttentionShape& s, const AttentionOperand& query, const AttentionOperand& key,
              const AttentionOperand& value, const AttentionOperand& grad, const void* lse, const void* row_sum,
              void* for_query, void* for_key, void* for_value) {
  if (s.dtype == DType::kF64)
    return ref::attention_backward(launch, s, query, key, value, grad, lse, row_sum, for_query, for_key, for_value);
  const Runs runs(s);
  const int64_t of_keys = s.keys * s.size, of_values = s.keys * s.value_size, all = runs.heads * (of_keys + of_values);
  float *keys = static_cast<float*>(for_key), *values = static_cast<float*>(for_value);
  std::fill(keys, keys + runs.heads * of_keys, 0.0f);
  std::fill(values, values + runs.heads * of_values, 0.0f);
  if (runs.count == 0) return;
  std::vector<float> more(static_cast<size_t>((runs.count - 1) * all), 0.0f);
  const BackwardCall call = {
      s, query, key, value, grad, static_cast<const float*>(lse), static_cast<const float*>(row_sum)};
  const auto body = [&](size_t begin, size_t end) {
    const int64_t numel = DS_BODY(backward_scratch, isa)(s);
    std::unique_ptr<float[]> scratch(new float[numel]);
    for (size_t i = begin; i < end; ++i) {
      const int64_t run = static_cast<int64_t>(i) / runs.heads, head = static_cast<int64_t>(i) % runs.heads;
      float* own = run == 0 ? nullptr : more.data() + (run - 1) * all + head * (of_keys + of_values);
      float *own_keys = run == 0 ? keys + head * of_keys : own,
            *own_values = run == 0 ? values + head * of_values : own + of_keys;
      for (int64_t g = runs.begin(run); g < runs.begin(run + 1); ++g) {
        const QueryGroup rows = runs.of_head.group(g % runs.groups);
        const int64_t batch = head / s.kv_heads, reader = head % s.kv_heads * runs.readers + g / runs.groups;
        float* own_queries =
            static_cast<float*>(for_query) + ((batch * s.heads + reader) * s.queries + rows.row) * s.size;
        const GradientGroup group = {batch, reader, rows, own_queries, own_keys, own_values};
        DS_BODY(attention_backward, isa)(call, group, scratch.get());
      }
    }
  };
  const auto tasks = static_cast<size_t>(runs.heads * runs.count);
  const bool alone = launch.pool == nullptr || multiplications(s) < kAttentionInline;
  alone ? body(0, tasks) : launch.pool->parallel_for(tasks, 1, body);
  for (int64_t run = 1; run < runs.count; ++run) {
    for (int64_t head = 0; head < runs.heads; ++head) {
      const float* own = more.data() + (run - 1) * all + head * (of_keys + of_values);
      for (int64_t i = 0; i < of_keys; ++i) keys[head * of_keys + i] += own[i];
      for (int64_t i = 0; i < of_values; ++i) values[head * of_values + i] += own[of_keys + i];
    }
  }
}

}  // namespace

const decltype(AttentionKernels::backward) kAttentionBackward[kIsaCount] = DS_ENTRIES(backward);

}  // namespace ds::kernels::cpu
#endif

// Gradients of attention from one block (kernels/attention.h), in tiles: see attention-inl.h. Scores are computed
// again.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_backward.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention-inl.h"

#ifndef DS_KERNELS_CPU_ATTENTION_BACKWARD
#define DS_KERNELS_CPU_ATTENTION_BACKWARD
namespace ds::kernels::cpu {
struct BackwardCall {
  AttentionShape shape;
  AttentionOperand query, key, value, grad;
  const float *lse, *row_sum;
  float* for_query;
};
// Queries [row, row + count) of one head, and where the gradients of the head's keys and values grow.
struct GradientGroup {
  int64_t batch, head, row, count;
  float *for_key, *for_value;
};
}  // namespace ds::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

// Changes a panel in place: scores become the factors of values, and the gradients of these factors become gradients of
// scores before they were scaled. `factors`: of dropout, or null.
inline void take_gradients(const AttentionShape& s, float* scores, float* grads, Seen seen, const float* lse,
                           const float* row_sum, const float* factors) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = 2 * lanes;
  const auto scale = Set(d, s.scale), cap = Set(d, s.soft_cap), one = Set(d, 1.0f);
  for (int64_t part = 0; part < wide; part += lanes) {
    const auto level = LoadU(d, lse + part), less = LoadU(d, row_sum + part);
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      float *score = scores + j * wide + part, *grad = grads + j * wide + part;
      const auto x = LoadU(d, score), p = exp_of(d, Sub(x, level));
      const auto kept = factors == nullptr ? one : LoadU(d, factors + j * wide + part);
      auto down = Mul(Mul(p, Sub(Mul(LoadU(d, grad), kept), less)), scale);
      if (s.soft_cap > 0) {
        const auto t = Div(Max(x, Neg(cap)), cap);  // for masked keys x is -inf and p is 0
        down = Mul(down, Sub(one, Mul(t, t)));
      }
      StoreU(Mul(p, kept), d, score);
      StoreU(down, d, grad);
    }
  }
}

// out[keys of the tile][size] += scores[keys][panel] * rows[queries of the panel][size]; `rows` is packed by features.
inline void add_to_keys(float* out, int64_t size, const float* scores, Seen seen, const float* rows, int64_t queries,
                        float* packed) {
  const int64_t wide = panel_width(), keys = seen.end - seen.begin;
  pack(packed, scores + seen.begin * wide, keys, queries, wide, int64_t{1}, int64_t{kTileRows});
  for (int64_t f = 0; f < size; f += wide)
    for (int64_t r = 0; r < keys; r += kTileRows)
      add_tile(packed + r * queries, rows + f * queries, queries, out + (seen.begin + r) * size + f, size,
               cpu::least(kTileRows, keys - r), cpu::least(wide, size - f), false);
}

int64_t backward_scratch(const AttentionShape& s) {
  const int64_t wide = panel_width(), sizes = s.size + s.value_size;
  return cpu::kGroupRows * (2 * sizes + 2 * wide + whole_rows(s.size) + 2) +
         cpu::kKeyTile * (sizes + whole_rows(s.size) + 3 * wide);
}

template <class T>
void backward_of(const cpu::BackwardCall& call, const cpu::GradientGroup& g, float* scratch) {
  const AttentionShape& s = call.shape;
  const int64_t wide = panel_width(), panels = (g.count + wide - 1) / wide, features = whole_rows(s.size);
  const int64_t across_q = (s.size + wide - 1) / wide * wide, across_g = (s.value_size + wide - 1) / wide * wide;
  cpu::Floats floats(scratch);
  float *rows = floats.take(cpu::kGroupRows * s.size), *upper = floats.take(cpu::kGroupRows * s.value_size),
        *plain_rows = floats.take(cpu::kGroupRows * across_q), *plain_upper = floats.take(cpu::kGroupRows * across_g),
        *sums = floats.take(cpu::kGroupRows * features), *lse = floats.take(cpu::kGroupRows),
        *row_sum = floats.take(cpu::kGroupRows), *keys = floats.take(cpu::kKeyTile * s.size),
        *values = floats.take(cpu::kKeyTile * s.value_size), *turned = floats.take(cpu::kKeyTile * features),
        *scores = floats.take(cpu::kKeyTile * wide), *grads = floats.take(cpu::kKeyTile * wide),
        *packed = floats.take(cpu::kKeyTile * wide);
  const int64_t kv = g.head / (s.heads / s.kv_heads), at = (g.batch * s.heads + g.head) * s.queries + g.row;
  const T *q = static_cast<const T*>(call.query.data) + g.batch * call.query.batch + g.head * call.query.head,
          *k = static_cast<const T*>(call.key.data) + g.batch * call.key.batch + kv * call.key.head,
          *v = static_cast<const T*>(call.value.data) + g.batch * call.value.batch + kv * call.value.head,
          *up = static_cast<const T*>(call.grad.data) + g.batch * call.grad.batch + g.head * call.grad.head;

  pack_rows(rows, q, call.query.token, g.row, g.count, s.size, s.soft_cap > 0 ? s.scale / s.soft_cap : s.scale);
  pack_rows(upper, up, call.grad.token, g.row, g.count, s.value_size, 1.0f);
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t first = p * wide, own = cpu::least(wide, g.count - first);
    pack(plain_rows + first * across_q, q + (g.row + first) * call.query.token, s.size, own, int64_t{1},
         call.query.token, wide);
    pack(plain_upper + first * across_g, up + (g.row + first) * call.grad.token, s.value_size, own, int64_t{1},
         call.grad.token, wide);
  }
  for (int64_t i = 0; i < panels * wide; ++i) {
    const float level = i < g.count ? call.lse[at + i] : 0.0f;
    lse[i] = level == -INFINITY ? 0.0f : level;  // has seen nothing
    row_sum[i] = i < g.count ? call.row_sum[at + i] : 0.0f;
  }
  __builtin_memset(sums, 0, static_cast<size_t>(panels * wide * features) * sizeof(float));

  for (int64_t start = 0; start < s.keys; start += cpu::kKeyTile) {
    const int64_t count = cpu::least(cpu::kKeyTile, s.keys - start);
    const Seen any = seen_of(s, g.row, g.count, start, count);
    if (any.begin >= any.end) continue;
    pack(keys, k + start * call.key.token, count, s.size, call.key.token, int64_t{1}, int64_t{kTileRows});
    pack(values, v + start * call.value.token, count, s.value_size, call.value.token, int64_t{1}, int64_t{kTileRows});
    pack(turned, k + start * call.key.token, s.size, count, int64_t{1}, call.key.token, int64_t{kTileRows});
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t first = p * wide, own = cpu::least(wide, g.count - first);
      const Seen seen = seen_of(s, g.row + first, own, start, count);
      if (seen.begin >= seen.end) continue;
      multiply_rows(keys, rows + first * s.size, s.size, scores, seen);
      if (s.soft_cap > 0) cap_scores(scores, s.soft_cap, seen);
      if (!mask_scores(s, g.batch, g.row + first, own, start, seen, scores, packed)) continue;
      multiply_rows(values, upper + first * s.value_size, s.value_size, grads, seen);
      const bool drops = drop_factors(s, g.batch, g.head, g.row + first, start, seen, packed);
      take_gradients(s, scores, grads, seen, lse + first, row_sum + first, drops ? packed : nullptr);
      add_to_keys(g.for_value + start * s.value_size, s.value_size, scores, seen, plain_upper + first * across_g, own,
                  packed);
      add_to_keys(g.for_key + start * s.size, s.size, grads, seen, plain_rows + first * across_q, own, packed);
      multiply_keys(turned, grads, count, sums + first * features, s.size, seen);
    }
  }
  for (int64_t p = 0; p < panels; ++p)
    pack(call.for_query + (at + p * wide) * s.size, sums + p * wide * features, s.size,
         cpu::least(wide, g.count - p * wide), wide, int64_t{1}, s.size);
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
  int64_t heads, readers, rows, groups, count;

  explicit Runs(const AttentionShape& s)
      : heads(s.batch * s.kv_heads),
        readers(s.heads / s.kv_heads),
        rows(kGroupRows),
        groups((s.queries + rows - 1) / rows) {
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
  const BackwardCall call = {s,
                             query,
                             key,
                             value,
                             grad,
                             static_cast<const float*>(lse),
                             static_cast<const float*>(row_sum),
                             static_cast<float*>(for_query)};
  const auto body = [&](size_t begin, size_t end) {
    const int64_t numel = DS_BODY(backward_scratch, isa)(s);
    std::unique_ptr<float[]> scratch(new float[numel]);
    for (size_t i = begin; i < end; ++i) {
      const int64_t run = static_cast<int64_t>(i) / runs.heads, head = static_cast<int64_t>(i) % runs.heads;
      float* own = run == 0 ? nullptr : more.data() + (run - 1) * all + head * (of_keys + of_values);
      float *own_keys = run == 0 ? keys + head * of_keys : own,
            *own_values = run == 0 ? values + head * of_values : own + of_keys;
      for (int64_t g = runs.begin(run); g < runs.begin(run + 1); ++g) {
        const int64_t row = g % runs.groups * runs.rows, reader = g / runs.groups;
        const GradientGroup group = {head / s.kv_heads,
                                     head % s.kv_heads * runs.readers + reader,
                                     row,
                                     std::min(runs.rows, s.queries - row),
                                     own_keys,
                                     own_values};
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

// Rows see a block of keys (kernels/attention.h), in tiles: see attention-inl.h.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention-inl.h"

#ifndef DS_KERNELS_CPU_ATTENTION_GROUP
#define DS_KERNELS_CPU_ATTENTION_GROUP
namespace ds::kernels::cpu {
// Queries [row, row + count) of one head.
struct SeeingGroup {
  int64_t batch, head, row, count;
  bool fresh;
};
}  // namespace ds::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

// Scores to exponentials: a panel's largest scores, totals and sums of values grow by one tile.
inline void take_exponentials(float* scores, Seen seen, float* largest, float* total, float* sums, int64_t size) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = seen.wide;
  for (int64_t part = 0; part < wide; part += lanes) {
    const auto before = LoadU(d, largest + part);
    auto high = before, other = before;
    int64_t j = seen.begin;
    for (; j + 2 <= seen.end; j += 2) {
      high = Max(high, LoadU(d, scores + j * wide + part));
      other = Max(other, LoadU(d, scores + (j + 1) * wide + part));
    }
    if (j < seen.end) high = Max(high, LoadU(d, scores + j * wide + part));
    high = Max(high, other);
    // A row that has seen nothing yet has -inf here; any finite number will do in its place.
    const auto level = IfThenElse(Eq(high, Set(d, -INFINITY)), Zero(d), high);
    const auto shrink = exp_of(d, Sub(before, level));
    auto sum = Mul(LoadU(d, total + part), shrink);
    for (j = seen.begin; j < seen.end; ++j) {
      const auto p = exp_of(d, Sub(LoadU(d, scores + j * wide + part), level));
      sum = Add(sum, p);
      StoreU(p, d, scores + j * wide + part);
    }
    StoreU(IfThenElse(Eq(sum, sum), high, sum), d, largest + part);  // a nan is not forgotten
    StoreU(sum, d, total + part);
    if (AllTrue(d, Eq(before, high))) continue;
    for (int64_t f = 0; f < size; ++f) StoreU(Mul(LoadU(d, sums + f * wide + part), shrink), d, sums + f * wide + part);
  }
}

int64_t forward_scratch(const AttentionShape& s) {
  const int64_t values = whole_rows(s.value_size);
  return cpu::kKeyTile * (s.size + values + cpu::most(s.size, s.value_size) + 2 * panel_width(s)) +
         cpu::kGroupRows * (s.size + values + 2);
}

template <class T>
void forward_of(const AttentionShape& s, const AttentionOperand& query, const AttentionOperand& key,
                const AttentionOperand& value, const AttentionState& state, const cpu::SeeingGroup& g, float* scratch) {
  const int64_t wide = panel_width(s), panels = (g.count + wide - 1) / wide, values = whole_rows(s.value_size);
  cpu::Floats floats(scratch);
  float *rows = floats.take(cpu::kGroupRows * s.size), *sums = floats.take(cpu::kGroupRows * values),
        *largest = floats.take(cpu::kGroupRows), *total = floats.take(cpu::kGroupRows),
        *keys = floats.take(cpu::kKeyTile * s.size), *features = floats.take(cpu::kKeyTile * values),
        *scores = floats.take(cpu::kKeyTile * wide), *spare = floats.take(cpu::kKeyTile * wide),
        *gathered = floats.take(cpu::kKeyTile * cpu::most(s.size, s.value_size));
  const int64_t kv = g.head / (s.heads / s.kv_heads), at = (g.batch * s.heads + g.head) * s.queries + g.row;
  const T *q = static_cast<const T*>(query.data) + g.batch * query.batch + g.head * query.head,
          *k = static_cast<const T*>(key.data) + g.batch * key.batch + kv * key.head,
          *v = static_cast<const T*>(value.data) + g.batch * value.batch + kv * value.head;
  auto *out_sum = static_cast<float*>(state.sum) + at * s.value_size, *out_largest = static_cast<float*>(state.largest),
       *out_total = static_cast<float*>(state.total);

  pack_rows(rows, q, query.token, g.row, g.count, s.size, wide, s.soft_cap > 0 ? s.scale / s.soft_cap : s.scale);
  for (int64_t i = 0; i < panels * wide; ++i) {
    const bool known = !g.fresh && i < g.count;
    largest[i] = known ? out_largest[at + i] : -INFINITY;
    total[i] = known ? out_total[at + i] : 0.0f;
  }
  __builtin_memset(sums, 0, static_cast<size_t>(panels * wide * values) * sizeof(float));
  for (int64_t p = 0; p < panels && !g.fresh; ++p)
    pack(sums + p * wide * values, out_sum + p * wide * s.value_size, cpu::least(wide, g.count - p * wide),
         s.value_size, s.value_size, int64_t{1}, wide);

  KeyTiles tile(s, g.head, g.row, g.count);
  while (tile.next()) {
    const int64_t count = tile.keys();
    with_rows(tile, k, key.token, s.size, gathered, [&](const auto* x, int64_t token) {
      pack(keys, x, count, s.size, token, int64_t{1}, int64_t{kTileRows});
    });
    with_rows(tile, v, value.token, s.value_size, gathered, [&](const auto* x, int64_t token) {
      pack(features, x, s.value_size, count, int64_t{1}, token, int64_t{kTileRows});
    });
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t first = p * wide, own = cpu::least(wide, g.count - first), row = g.row + first;
      const Seen seen = tile.seen(row, own);
      if (seen.begin >= seen.end) continue;
      multiply_rows(keys, rows + first * s.size, s.size, scores, seen);
      if (!finish_scores(s, tile, g.batch, g.head, row, own, seen, scores, spare, nullptr)) continue;
      take_exponentials(scores, seen, largest + first, total + first, sums + first * values, s.value_size);
      if (drop_factors(s, tile, g.batch, g.head, row, own, spare)) multiply_by(spare, scores, seen);
      multiply_keys(features, scores, count, sums + first * values, s.value_size, seen);
    }
  }

  for (int64_t p = 0; p < panels; ++p)
    pack(out_sum + p * wide * s.value_size, sums + p * wide * values, s.value_size,
         cpu::least(wide, g.count - p * wide), wide, int64_t{1}, s.value_size);
  __builtin_memcpy(out_largest + at, largest, static_cast<size_t>(g.count) * sizeof(float));
  __builtin_memcpy(out_total + at, total, static_cast<size_t>(g.count) * sizeof(float));
}

void attention_forward(const AttentionShape& s, const AttentionOperand& query, const AttentionOperand& key,
                       const AttentionOperand& value, const AttentionState& state, const cpu::SeeingGroup& group,
                       float* scratch) {
  with_type(s.dtype, [&](auto type) { forward_of<decltype(type)>(s, query, key, value, state, group, scratch); });
}

void attention_merge(const AttentionState& into, const AttentionState& from, int64_t row, int64_t size) {
  auto *high = static_cast<float*>(into.largest), *total = static_cast<float*>(into.total);
  const float other = static_cast<const float*>(from.largest)[row],
              largest = high[row] < other || other != other ? other : high[row];
  if (largest == -INFINITY) return;
  const float keep = __builtin_expf(high[row] - largest), add = __builtin_expf(other - largest);
  high[row] = largest;
  total[row] = total[row] * keep + static_cast<const float*>(from.total)[row] * add;
  float* to = static_cast<float*>(into.sum) + row * size;
  const float* more = static_cast<const float*>(from.sum) + row * size;
  each_element(static_cast<size_t>(size), [&](auto d, size_t i) HWY_ATTR {
    const auto kept = Mul(LoadU(d, to + i), Set(d, keep));
    StoreU(Add(kept, Mul(LoadU(d, more + i), Set(d, add))), d, to + i);
  });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <memory>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/split.h"
#include "kernels/ref/attention.h"

namespace ds::kernels::cpu {
namespace {

template <Isa isa>
void forward(const Launch& launch, const AttentionShape& s, const AttentionOperand& query, const AttentionOperand& key,
             const AttentionOperand& value, const AttentionState& state, bool fresh) {
  if (s.dtype == DType::kF64) return ref::attention_forward(launch, s, query, key, value, state, fresh);
  // Small groups where there would be few: rows are computed alike in any.
  const int64_t heads = s.batch * s.heads;
  const QueryGroups groups(s, heads * s.queries >= 16 * kGroupRows ? kGroupRows : kGroupRows / 4);
  const int64_t per_head = groups.count();
  const auto body = [&](size_t begin, size_t end) {
    const int64_t numel = DS_BODY(forward_scratch, isa)(s);
    std::unique_ptr<float[]> scratch(new float[numel]);
    for (size_t i = begin; i < end; ++i) {
      const int64_t head = static_cast<int64_t>(i) / per_head;
      const QueryGroup own = groups.group(static_cast<int64_t>(i) % per_head);
      const SeeingGroup group = {head / s.heads, head % s.heads, own.row, own.count, fresh};
      DS_BODY(attention_forward, isa)(s, query, key, value, state, group, scratch.get());
    }
  };
  const auto tasks = static_cast<size_t>(heads * per_head);
  if (tasks == 0) return;
  if (launch.pool == nullptr || multiplications(s) < kAttentionInline) return body(0, tasks);
  launch.pool->parallel_for(tasks, 1, body);
}

template <Isa isa>
void merge(const Launch& launch, const AttentionState& into, const AttentionState& from, DType wide, size_t rows,
           size_t value_size) {
  if (wide == DType::kF64) return ref::attention_merge(launch, into, from, wide, rows, value_size);
  const auto body = [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row)
      DS_BODY(attention_merge, isa)(into, from, static_cast<int64_t>(row), static_cast<int64_t>(value_size));
  };
  if (launch.pool == nullptr || rows * value_size <= kInline) return body(0, rows);
  launch.pool->parallel_for(rows, std::max<size_t>(1, kGrain / std::max<size_t>(1, value_size)), body);
}

}  // namespace

const decltype(AttentionKernels::forward) kAttentionForward[kIsaCount] = DS_ENTRIES(forward);
const decltype(AttentionKernels::merge) kAttentionMerge[kIsaCount] = DS_ENTRIES(merge);

}  // namespace ds::kernels::cpu
#endif

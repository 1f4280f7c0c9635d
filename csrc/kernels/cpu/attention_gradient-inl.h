// Code that all gradients of attention share: the panels of a group of queries, whose scores are computed again tile by
// tile. See attention-inl.h.
#ifndef DS_KERNELS_CPU_ATTENTION_BACKWARD
#define DS_KERNELS_CPU_ATTENTION_BACKWARD
#include "kernels/attention.h"
namespace ds::kernels::cpu {
struct BackwardCall {
  AttentionShape shape;
  AttentionOperand query, key, value, grad;
  const float *lse, *row_sum;
};
}  // namespace ds::kernels::cpu
#endif

#if defined(DS_KERNELS_CPU_ATTENTION_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_KERNELS_CPU_ATTENTION_GRADIENT_INL_H_
#undef DS_KERNELS_CPU_ATTENTION_GRADIENT_INL_H_
#else
#define DS_KERNELS_CPU_ATTENTION_GRADIENT_INL_H_
#endif

#include "kernels/cpu/attention-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

// Changes a panel in place: scores become the factors of values, and the gradients of these factors become gradients of
// scores, times `scale`. `slopes`: the derivatives of caps, or null; `factors`: of dropout, or null.
inline void take_gradients(float* scores, float* grads, Seen seen, const float* lse, const float* row_sum, float scale,
                           const float* slopes, const float* factors) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = seen.wide;
  const auto one = Set(d, 1.0f);
  for (int64_t part = 0; part < wide; part += lanes) {
    const auto level = LoadU(d, lse + part), less = LoadU(d, row_sum + part);
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      const int64_t at = j * wide + part;
      const auto p = exp_of(d, Sub(LoadU(d, scores + at), level));
      const auto kept = factors == nullptr ? one : LoadU(d, factors + at);
      auto down = Mul(Mul(p, Sub(Mul(LoadU(d, grads + at), kept), less)), Set(d, scale));
      if (slopes != nullptr) down = Mul(down, LoadU(d, slopes + at));
      StoreU(Mul(p, kept), d, scores + at);
      StoreU(down, d, grads + at);
    }
  }
}

// A panel of a group.
struct Panel {
  int64_t first, row, count;  // its first query in the group and in the head, and how many there are
  Seen seen;                  // of the tile
};

// The queries of a group and the gradients of their outputs, and the tile of keys that they are at.
template <class T>
class GradientPanels {
 public:
  // `scale`: of the gradients of scores. `caps`: these are of scores before they were capped.
  GradientPanels(const cpu::BackwardCall& call, int64_t batch, int64_t head, cpu::QueryGroup group, float scale,
                 bool caps, cpu::Floats& floats)
      : call_(call),
        shape_(call.shape),
        batch_(batch),
        head_(head),
        group_(group),
        wide_(panel_width(shape_)),
        scale_(scale),
        rows_(floats.take(cpu::kGroupRows * shape_.size)),
        upper_(floats.take(cpu::kGroupRows * shape_.value_size)),
        lse_(floats.take(cpu::kGroupRows)),
        row_sum_(floats.take(cpu::kGroupRows)),
        keys_(floats.take(cpu::kKeyTile * shape_.size)),
        values_(floats.take(cpu::kKeyTile * shape_.value_size)),
        gathered_(floats.take(cpu::kKeyTile * cpu::most(shape_.size, shape_.value_size))),
        slopes_(floats.take(cpu::kKeyTile * wide_)),
        tile(shape_, head, group.row, group.count),
        scores(floats.take(cpu::kKeyTile * wide_)),
        grads(floats.take(cpu::kKeyTile * wide_)),
        spare(floats.take(cpu::kKeyTile * wide_)) {
    const AttentionShape& s = shape_;
    if (!caps || s.soft_cap == 0) slopes_ = nullptr;
    pack_rows(rows_, query(), call.query.token, group.row, group.count, s.size, wide_,
              s.soft_cap > 0 ? s.scale / s.soft_cap : s.scale);
    pack_rows(upper_, grad(), call.grad.token, group.row, group.count, s.value_size, wide_, 1.0f);
    const int64_t at = (batch * s.heads + head) * s.queries + group.row;
    for (int64_t i = 0; i < panels() * wide_; ++i) {
      const float level = i < group.count ? call.lse[at + i] : 0.0f;
      lse_[i] = level == -INFINITY ? 0.0f : level;  // has seen nothing
      row_sum_[i] = i < group.count ? call.row_sum[at + i] : 0.0f;
    }
  }
  // Floats that an object takes.
  static int64_t scratch(const AttentionShape& s) {
    return cpu::kGroupRows * (s.size + s.value_size + 2) +
           cpu::kKeyTile * (s.size + s.value_size + cpu::most(s.size, s.value_size) + 4 * panel_width(s));
  }

  int64_t panels() const { return (group_.count + wide_ - 1) / wide_; }
  const T* query() const { return of<T>(call_.query, head_); }
  const T* grad() const { return of<T>(call_.grad, head_); }

  // The next tile; false: there is none. each_key(rows, distance) may pack its keys, too.
  template <class EachKey>
  bool next_tile(const EachKey& each_key) {
    if (!tile.next()) return false;
    const int64_t kv = head_ / (shape_.heads / shape_.kv_heads);
    with_rows(tile, of<T>(call_.key, kv), call_.key.token, shape_.size, gathered_, [&](const auto* x, int64_t token) {
      pack(keys_, x, tile.keys(), shape_.size, token, int64_t{1}, int64_t{kTileRows});
      each_key(x, token);
    });
    with_rows(tile, of<T>(call_.value, kv), call_.value.token, shape_.value_size, gathered_,
              [&](const auto* x, int64_t token) {
                pack(values_, x, tile.keys(), shape_.value_size, token, int64_t{1}, int64_t{kTileRows});
              });
    return true;
  }

  // Computes `scores`, which are then the factors of values, and `grads`. False: the panel sees nothing of the tile.
  bool compute(int64_t number, Panel& panel) {
    const AttentionShape& s = shape_;
    const int64_t first = number * wide_;
    panel.first = first, panel.row = group_.row + first, panel.count = cpu::least(wide_, group_.count - first);
    panel.seen = tile.seen(panel.row, panel.count);
    if (panel.seen.begin >= panel.seen.end) return false;
    multiply_rows(keys_, rows_ + first * s.size, s.size, scores, panel.seen);
    if (!finish_scores(s, tile, batch_, head_, panel.row, panel.count, panel.seen, scores, spare, slopes_))
      return false;
    multiply_rows(values_, upper_ + first * s.value_size, s.value_size, grads, panel.seen);
    const bool drops = drop_factors(s, tile, batch_, head_, panel.row, panel.count, spare);
    take_gradients(scores, grads, panel.seen, lse_ + first, row_sum_ + first, scale_, slopes_, drops ? spare : nullptr);
    return true;
  }

 private:
  template <class U>
  const U* of(const AttentionOperand& x, int64_t head) const {
    return static_cast<const U*>(x.data) + batch_ * x.batch + head * x.head;
  }

  const cpu::BackwardCall& call_;
  const AttentionShape& shape_;
  const int64_t batch_, head_;
  const cpu::QueryGroup group_;
  const int64_t wide_;
  const float scale_;
  float *rows_, *upper_, *lse_, *row_sum_, *keys_, *values_, *gathered_, *slopes_;

 public:
  KeyTiles tile;
  float *scores, *grads, *spare;  // panels; `spare` may be used between calls
};

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

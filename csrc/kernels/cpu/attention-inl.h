// Code that forward and backward of attention share: tiles of scores whose columns are queries, so that maxima, sums
// and masks are vectors of queries, and whose rows are as the products want them (kernels/cpu/gemm-inl.h). A *panel* is
// as many queries as two registers hold; a *group*, some panels for which keys and values are packed once.
#ifndef DS_KERNELS_CPU_ATTENTION_TILES
#define DS_KERNELS_CPU_ATTENTION_TILES
#include <cmath>

#include "kernels/attention.h"
namespace ds::kernels::cpu {
constexpr int64_t kKeyTile = 192;    // a multiple of every kTileRows
constexpr int64_t kGroupRows = 256;  // queries, a multiple of every panel

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

// Keys [key, key + count) of a call, which are rows [at, at + count) of a tile.
struct KeysOfTile {
  int64_t key, at, count;
};
constexpr int64_t kMostRuns = 24;  // of keys in a tile

// Queries [row, row + count) of one head, of one block of queries.
struct QueryGroup {
  int64_t row, count;
};
// The groups of a head, of at most `most` queries.
class QueryGroups {
 public:
  QueryGroups(const AttentionShape& s, int64_t most)
      : queries_(s.queries),
        block_(s.blocks.size > 0 ? s.blocks.size : s.queries),
        per_block_((block_ + most - 1) / most),
        rows_(per_block_ == 1 ? block_ : most) {}

  int64_t count() const {
    if (queries_ == 0) return 0;
    const int64_t whole = queries_ / block_, rest = queries_ % block_;
    return whole * per_block_ + (rest + rows_ - 1) / rows_;
  }
  QueryGroup group(int64_t i) const {
    const int64_t first = i / per_block_ * block_, row = first + i % per_block_ * rows_;
    return {row, least(least(rows_, first + block_ - row), queries_ - row)};
  }

 private:
  int64_t queries_, block_, per_block_, rows_;
};

// Memory of one thread, handed out piece by piece; all pieces are of whole panels.
class Floats {
 public:
  explicit Floats(float* at) : at_(at) {}
  float* take(int64_t n) {
    float* here = at_;
    at_ += n;
    return here;
  }

 private:
  float* at_;
};
}  // namespace ds::kernels::cpu
#endif

#if defined(DS_KERNELS_CPU_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_KERNELS_CPU_ATTENTION_INL_H_
#undef DS_KERNELS_CPU_ATTENTION_INL_H_
#else
#define DS_KERNELS_CPU_ATTENTION_INL_H_
#endif

#include "kernels/cpu/gemm-inl.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/random-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

// Queries of a panel: two registers of them, or one where no block of queries has more.
inline int64_t panel_width(const AttentionShape& s) {
  const auto lanes = static_cast<int64_t>(Lanes(ScalableTag<float>()));
  return s.blocks.size > 0 && s.blocks.size <= lanes ? lanes : 2 * lanes;
}
// add_tile() for panels of `wide` queries.
inline void add_panel_tile(const float* a, const float* b, int64_t depth, float* c, int64_t stride, int64_t rows,
                           int64_t columns, int64_t wide, bool fresh) {
  const bool narrow = wide == static_cast<int64_t>(Lanes(ScalableTag<float>()));
  (narrow ? &add_narrow_tile : &add_tile)(a, b, depth, c, stride, rows, columns, fresh);
}
inline int64_t whole_rows(int64_t n) { return (n + kTileRows - 1) / kTileRows * kTileRows; }

// Keys [begin, end) of a tile, for a panel of `wide` queries. `partly`: not every query sees all of them by its
// position.
struct Seen {
  int64_t begin, end;
  bool partly;
  int64_t wide;
};
// Those that a panel of queries [row, row + count) looks at among the `keys` first ones of a tile that begins at key
// `start`; begin is a multiple of kTileRows.
inline Seen seen_of(const AttentionShape& s, int64_t row, int64_t count, int64_t start, int64_t keys) {
  const KeyRun low = keys_by_position(s, row), high = keys_by_position(s, row + count - 1);
  const int64_t begin = cpu::most(low.first - start, 0), end = cpu::least(high.stop - start, keys);
  const bool partly = high.first - start > begin / kTileRows * kTileRows || low.stop - start < end;
  return {begin / kTileRows * kTileRows, cpu::most(end, begin / kTileRows * kTileRows), partly, panel_width(s)};
}

// The keys of a group of queries [row, row + count), which are of one block of queries: tiles that hold keys of
// several blocks, without those that no query of the group may see by its position.
class KeyTiles {
 public:
  KeyTiles(const AttentionShape& s, int64_t head, int64_t row, int64_t count)
      : s_(s), row_(row), count_(count), blocks_(blocks_of(s, head, row)) {}

  // Finds the next tile; false: there is none.
  bool next() {
    runs_ = 0, keys_ = 0;
    while (at_ < blocks_.count && keys_ < cpu::kKeyTile && runs_ < cpu::kMostRuns) {
      const int64_t first = blocks_.all ? 0 : blocks_.list[at_] * s_.blocks.size;
      const int64_t stop = blocks_.all ? s_.keys : cpu::least(first + s_.blocks.size, s_.keys);
      const int64_t key = first + inside_, keys = cpu::least(stop - key, cpu::kKeyTile - keys_);
      inside_ += keys;
      if (first + inside_ >= stop) inside_ = 0, ++at_;
      const Seen seen = seen_of(s_, row_, count_, key, keys);
      if (seen.begin >= seen.end) continue;
      run_[runs_++] = {key, keys_, keys};
      keys_ += keys;
    }
    return runs_ > 0;
  }
  int64_t keys() const { return keys_; }
  int64_t runs() const { return runs_; }
  const cpu::KeysOfTile& run(int64_t i) const { return run_[i]; }

  // The keys of the tile that the panel of queries [row, row + count) sees.
  Seen seen(int64_t row, int64_t count) const {
    if (runs_ == 1) return seen_of(s_, row, count, run_[0].key, keys_);
    return {0, keys_, true, panel_width(s_)};
  }
  // Those of a run, by their numbers in the tile.
  Seen seen(int64_t row, int64_t count, const cpu::KeysOfTile& run) const {
    if (runs_ == 1) return seen(row, count);
    const Seen seen = seen_of(s_, row, count, run.key, run.count);
    return {run.at, run.at + run.count, seen.partly || seen.begin > 0 || seen.end < run.count, seen.wide};
  }

 private:
  const AttentionShape& s_;
  const int64_t row_, count_;
  const ListedBlocks blocks_;
  int64_t at_ = 0, inside_ = 0, runs_ = 0, keys_ = 0;
  cpu::KeysOfTile run_[cpu::kMostRuns];
};

// Calls use(rows, distance) with the rows of x for the keys of a tile, which follow each other at that distance.
// `spare`: kKeyTile * size floats.
template <class T, class Use>
void with_rows(const KeyTiles& tile, const T* x, int64_t token, int64_t size, float* spare, const Use& use) {
  if (tile.runs() == 1) return use(x + tile.run(0).key * token, token);
  float* to = spare;
  for (int64_t r = 0; r < tile.runs(); ++r) {
    const T* from = x + tile.run(r).key * token;
    for (int64_t i = 0; i < tile.run(r).count; ++i, from += token, to += size)
      each_element(static_cast<size_t>(size), [&](auto d, size_t f) HWY_ATTR { StoreU(load(d, from + f), d, to + f); });
  }
  use(static_cast<const float*>(spare), size);
}

// Scores of keys [begin, end) x a panel: a packed by keys, b by queries, both over `depth` features.
inline void multiply_rows(const float* a, const float* b, int64_t depth, float* c, Seen seen) {
  const int64_t wide = seen.wide;
  for (int64_t r = seen.begin; r < seen.end; r += kTileRows)
    add_panel_tile(a + r * depth, b, depth, c + r * wide, wide, kTileRows, wide, wide, true);
}

// c[rows][panel] += a[rows][keys] * scores[keys][panel]: a is packed by its rows over `keys` keys.
inline void multiply_keys(const float* a, const float* scores, int64_t keys, float* c, int64_t rows, Seen seen) {
  const int64_t wide = seen.wide;
  for (int64_t r = 0; r < rows; r += kTileRows)
    add_panel_tile(a + r * keys + seen.begin * kTileRows, scores + seen.begin * wide, seen.end - seen.begin,
                   c + r * wide, wide, kTileRows, wide, wide, false);
}

// Caps scores that have been multiplied by scale / soft_cap. `slopes`: where their derivatives go, or null.
inline void cap_scores(float* scores, float cap, Seen seen, float* slopes) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = seen.wide;
  for (int64_t i = seen.begin * wide; i < seen.end * wide; i += lanes) {
    const auto t = tanh_of(d, LoadU(d, scores + i));
    StoreU(Mul(t, Set(d, cap)), d, scores + i);
    if (slopes != nullptr) StoreU(NegMulAdd(t, t, Set(d, 1.0f)), d, slopes + i);
  }
}

// Adds one bias to the scores of a panel and a run of keys. `spare`: of a tile.
template <class T>
void add_bias(const AttentionBias& bias, const T* at, int64_t count, Seen seen, float* scores, float* spare) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = seen.wide, keys = seen.end - seen.begin;
  float* to = scores + seen.begin * wide;
  if (bias.query == 0) {
    for (int64_t j = 0; j < keys; ++j) {
      const auto more = Set(d, plain(at[j * bias.key]));
      for (int64_t part = 0; part < wide; part += lanes, to += lanes) StoreU(Add(LoadU(d, to), more), d, to);
    }
    return;
  }
  const bool alike = bias.key == 0;
  pack(spare, at, count, alike ? 1 : keys, bias.query, int64_t{1}, wide);
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t part = 0; part < wide; part += lanes, to += lanes)
      StoreU(Add(LoadU(d, to), LoadU(d, spare + (alike ? 0 : j * wide) + part)), d, to);
}

inline void add_biases(const AttentionShape& s, int64_t batch, int64_t head, int64_t row, int64_t count, int64_t start,
                       Seen seen, float* scores, float* spare) {
  for (const AttentionBias& bias : s.bias) {
    if (bias.data == nullptr || seen.begin >= seen.end) continue;
    with_type(bias.dtype, [&](auto type) {
      using T = decltype(type);
      const T* at = static_cast<const T*>(bias.data) + bias_offset(bias, batch, head, row, start + seen.begin);
      add_bias(bias, at, count, seen, scores, spare);
    });
  }
}

// Writes -inf where a query may not look; key number j of the tile is key start + j. Returns whether any of them sees
// one of these keys. `spare`: of a tile.
inline bool mask_scores(const AttentionShape& s, int64_t batch, int64_t row, int64_t count, int64_t start, Seen seen,
                        float* scores, float* spare) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = seen.wide;
  const auto never = Set(d, -INFINITY);
  if (seen.partly) {
    HWY_ALIGN float first[cpu::kPadding], stop[cpu::kPadding];
    for (int64_t i = 0; i < wide; ++i) {
      const KeyRun run = keys_by_position(s, row + cpu::least(i, count - 1));
      first[i] = static_cast<float>(cpu::most(run.first - start, 0));
      stop[i] = static_cast<float>(cpu::most(cpu::least(run.stop - start, seen.end), 0));
    }
    for (int64_t part = 0; part < wide; part += lanes) {
      const auto from = LoadU(d, first + part), to = LoadU(d, stop + part);
      for (int64_t j = seen.begin; j < seen.end; ++j) {
        const auto here = Set(d, static_cast<float>(j));
        const auto in = And(Ge(here, from), Lt(here, to));
        float* at = scores + j * wide + part;
        StoreU(IfThenElse(in, LoadU(d, at), never), d, at);
      }
    }
  }
  if (seen.begin >= seen.end) return false;
  if (s.looks == nullptr) return true;
  const uint8_t* looks = s.looks + batch * s.looks_batch + row * s.looks_query + start;
  const auto length = static_cast<size_t>(seen.end - seen.begin);
  bool any = false;
  if (s.looks_query == 0) {
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      any = any || looks[j] != 0;
      for (int64_t part = 0; part < wide && looks[j] == 0; part += lanes) StoreU(never, d, scores + j * wide + part);
    }
    return any;
  }
  bool all = true;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* own = looks + i * s.looks_query + seen.begin;
    all = all && __builtin_memchr(own, 0, length) == nullptr;
    any = any || own[0] != 0 || __builtin_memcmp(own, own + 1, length - 1) != 0;
  }
  if (all) return true;
  if (!any) {  // other runs of the tile may be seen
    for (int64_t i = seen.begin * wide; i < seen.end * wide; i += lanes) StoreU(never, d, scores + i);
    return false;
  }
  pack(spare, looks + seen.begin, count, seen.end - seen.begin, s.looks_query, int64_t{1}, wide);
  for (int64_t i = 0; i < (seen.end - seen.begin) * wide; i += lanes) {
    float* at = scores + seen.begin * wide + i;
    StoreU(IfThenElse(Eq(LoadU(d, spare + i), Zero(d)), never, LoadU(d, at)), d, at);
  }
  return any;
}

// The factors of the probabilities of a panel, kernels/philox.h in vectors of queries. False: by 1.
inline bool drop_factors(const AttentionShape& s, int64_t batch, int64_t head, int64_t row, int64_t start, Seen seen,
                         float* factors) {
  if (s.dropout.kept == 0) return false;
  const ScalableTag<float> d;
  const RebindToUnsigned<decltype(d)> bits;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = seen.wide;
  const auto below = Set(bits, s.dropout.below);
  const auto kept = Set(d, s.dropout.kept);
  for (int64_t part = 0; part < wide; part += lanes) {
    const auto query = Iota(bits, s.dropout.query + static_cast<uint32_t>(row + part));
    PhiloxVectors<Vec<decltype(bits)>> words = {query, query, query, query};
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      const uint32_t key = s.dropout.key + static_cast<uint32_t>(start + j);
      if (j == seen.begin || key % 4 == 0)
        words = philox_of(bits,
                          {query, Set(bits, key / 4), Set(bits, s.dropout.head + static_cast<uint32_t>(head)),
                           Set(bits, static_cast<uint32_t>(batch))},
                          s.dropout.seed);
      const auto word = key % 4 == 0 ? words.a : key % 4 == 1 ? words.b : key % 4 == 2 ? words.c : words.d;
      StoreU(IfThenZeroElse(RebindMask(d, Lt(word, below)), kept), d, factors + j * wide + part);
    }
  }
  return true;
}

// Products of queries and keys become scores: caps, biases and masks. Returns whether any query sees any of the keys.
// `slopes`: see cap_scores().
inline bool finish_scores(const AttentionShape& s, const KeyTiles& tile, int64_t batch, int64_t head, int64_t row,
                          int64_t count, Seen seen, float* scores, float* spare, float* slopes) {
  if (s.soft_cap > 0) cap_scores(scores, s.soft_cap, seen, slopes);
  bool any = false;
  for (int64_t r = 0; r < tile.runs(); ++r) {
    const cpu::KeysOfTile& run = tile.run(r);
    const Seen own = tile.seen(row, count, run);
    add_biases(s, batch, head, row, count, run.key - run.at, own, scores, spare);
    any = mask_scores(s, batch, row, count, run.key - run.at, own, scores, spare) || any;
  }
  return any;
}

// Writes the factors of a panel and all runs of a tile. Returns whether there is dropout.
inline bool drop_factors(const AttentionShape& s, const KeyTiles& tile, int64_t batch, int64_t head, int64_t row,
                         int64_t count, float* factors) {
  bool drops = false;
  for (int64_t r = 0; r < tile.runs(); ++r) {
    const cpu::KeysOfTile& run = tile.run(r);
    drops = drop_factors(s, batch, head, row, run.key - run.at, tile.seen(row, count, run), factors);
  }
  return drops;
}

// Multiplies a panel of scores by `factors`.
inline void multiply_by(const float* factors, float* scores, Seen seen) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = seen.wide;
  for (int64_t i = seen.begin * wide; i < seen.end * wide; i += lanes)
    StoreU(Mul(LoadU(d, scores + i), LoadU(d, factors + i)), d, scores + i);
}

// The panels of rows [row, row + count) of x, multiplied: [panel][size][queries].
template <class T>
void pack_rows(float* packed, const T* x, int64_t token, int64_t row, int64_t count, int64_t size, int64_t wide,
               float scale) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), all = (count + wide - 1) / wide * wide * size;
  pack(packed, x + row * token, count, size, token, int64_t{1}, wide);
  for (int64_t i = 0; i < all && scale != 1; i += lanes)
    StoreU(Mul(LoadU(d, packed + i), Set(d, scale)), d, packed + i);
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

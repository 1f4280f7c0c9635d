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

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

inline int64_t panel_width() { return 2 * static_cast<int64_t>(Lanes(ScalableTag<float>())); }
inline int64_t whole_rows(int64_t n) { return (n + kTileRows - 1) / kTileRows * kTileRows; }

// exp(x) for x below 88; 0 below -87.3. A nan stays one. Cody and Waite's reduction, Cephes' polynomial.
template <class D, class V = Vec<D>>
HWY_INLINE V exp_of(D d, V x) {
  const RebindToSigned<D> whole;
  const V n = Round(Mul(x, Set(d, 1.44269504088896341f)));
  const V r = MulAdd(n, Set(d, 2.12194440e-4f), MulAdd(n, Set(d, -0.693359375f), x));
  V p = MulAdd(Set(d, 1.9875691500e-4f), r, Set(d, 1.3981999507e-3f));
  p = MulAdd(p, r, Set(d, 8.3334519073e-3f));
  p = MulAdd(p, r, Set(d, 4.1665795894e-2f));
  p = MulAdd(p, r, Set(d, 1.6666665459e-1f));
  p = MulAdd(p, r, Set(d, 5.0000001201e-1f));
  const V y = Add(MulAdd(p, Mul(r, r), r), Set(d, 1.0f));
  const auto power = ShiftLeft<23>(Add(ConvertTo(whole, n), Set(whole, 127)));
  return IfThenZeroElse(Lt(x, Set(d, -87.3f)), Mul(y, BitCast(d, power)));
}

// tanh(x); near 0 by Cephes' polynomial, since 1 - exp(-2x) would lose digits.
template <class D, class V = Vec<D>>
HWY_INLINE V tanh_of(D d, V x) {
  const V one = Set(d, 1.0f), size = Abs(x), square = Mul(x, x);
  const V e = exp_of(d, Mul(size, Set(d, -2.0f)));
  const V far = CopySignToAbs(Div(Sub(one, e), Add(one, e)), x);
  V p = MulAdd(Set(d, -5.70498872745e-3f), square, Set(d, 2.06390887954e-2f));
  p = MulAdd(p, square, Set(d, -5.37397155531e-2f));
  p = MulAdd(p, square, Set(d, 1.33314422036e-1f));
  p = MulAdd(p, square, Set(d, -3.33332819422e-1f));
  return IfThenElse(Lt(size, Set(d, 0.625f)), MulAdd(Mul(p, square), x, x), far);
}

// The keys [begin, end) of a tile of `keys` that begins at `start`, which a panel of queries [row, row + count) looks
// at; begin is a multiple of kTileRows. `partly`: not every query sees all of them.
struct Seen {
  int64_t begin, end;
  bool partly;
};
inline Seen seen_of(const AttentionShape& s, int64_t row, int64_t count, int64_t start, int64_t keys) {
  const KeyRun low = keys_by_position(s, row), high = keys_by_position(s, row + count - 1);
  const int64_t begin = cpu::most(low.first - start, 0), end = cpu::least(high.stop - start, keys);
  const bool partly = high.first - start > begin / kTileRows * kTileRows || low.stop - start < end;
  return {begin / kTileRows * kTileRows, cpu::most(end, begin / kTileRows * kTileRows), partly};
}

// Scores of keys [begin, end) x a panel: a packed by keys, b by queries, both over `depth` features.
inline void multiply_rows(const float* a, const float* b, int64_t depth, float* c, Seen seen) {
  const int64_t wide = panel_width();
  for (int64_t r = seen.begin; r < seen.end; r += kTileRows)
    add_tile(a + r * depth, b, depth, c + r * wide, wide, kTileRows, wide, true);
}

// c[rows][panel] += a[rows][keys] * scores[keys][panel]: a is packed by its rows over `keys` keys.
inline void multiply_keys(const float* a, const float* scores, int64_t keys, float* c, int64_t rows, Seen seen) {
  const int64_t wide = panel_width();
  for (int64_t r = 0; r < rows; r += kTileRows)
    add_tile(a + r * keys + seen.begin * kTileRows, scores + seen.begin * wide, seen.end - seen.begin, c + r * wide,
             wide, kTileRows, wide, false);
}

// Scores that have been multiplied by scale / soft_cap.
inline void cap_scores(float* scores, float cap, Seen seen) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = 2 * lanes;
  for (int64_t i = seen.begin * wide; i < seen.end * wide; i += lanes)
    StoreU(Mul(tanh_of(d, LoadU(d, scores + i)), Set(d, cap)), d, scores + i);
}

// -inf where a query may not look. False: none of them sees any of these keys. `spare`: of a tile.
inline bool mask_scores(const AttentionShape& s, int64_t batch, int64_t row, int64_t count, int64_t start, Seen seen,
                        float* scores, float* spare) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = 2 * lanes;
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
  if (all || !any) return any;
  pack(spare, looks + seen.begin, count, seen.end - seen.begin, s.looks_query, int64_t{1}, wide);
  for (int64_t i = 0; i < (seen.end - seen.begin) * wide; i += lanes) {
    float* at = scores + seen.begin * wide + i;
    StoreU(IfThenElse(Eq(LoadU(d, spare + i), Zero(d)), never, LoadU(d, at)), d, at);
  }
  return any;
}

// The high halves of products.
template <class D, class V = Vec<D>>
HWY_INLINE V high_product(D d, V a, uint32_t b) {
#if HWY_TARGET == HWY_SCALAR
  return Set(d, static_cast<uint32_t>((uint64_t{GetLane(a)} * b) >> 32));
#else
  const RepartitionToWide<D> wide;
  const auto times = Set(d, b);
  const auto even = MulEven(a, times), odd = MulEven(BitCast(d, ShiftRight<32>(BitCast(wide, a))), times);
  return BitCast(d, Or(ShiftRight<32>(even), And(odd, Set(wide, 0xffffffff00000000u))));
#endif
}

// The factors of the probabilities of a panel, kernels/philox.h in vectors of queries. False: by 1.
inline bool drop_factors(const AttentionShape& s, int64_t batch, int64_t head, int64_t row, int64_t start, Seen seen,
                         float* factors) {
  if (s.dropout.kept == 0) return false;
  const ScalableTag<float> d;
  const RebindToUnsigned<decltype(d)> bits;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = 2 * lanes;
  const auto below = Set(bits, s.dropout.below);
  const auto kept = Set(d, s.dropout.kept);
  for (int64_t part = 0; part < wide; part += lanes) {
    const auto query = Iota(bits, s.dropout.query + static_cast<uint32_t>(row + part));
    auto a = query, b = query, c = query, e = query;
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      const uint32_t key = s.dropout.key + static_cast<uint32_t>(start + j);
      if (j == seen.begin || key % 4 == 0) {
        a = query, b = Set(bits, key / 4), c = Set(bits, s.dropout.head + static_cast<uint32_t>(head)),
        e = Set(bits, static_cast<uint32_t>(batch));
        uint32_t low = static_cast<uint32_t>(s.dropout.seed), high = static_cast<uint32_t>(s.dropout.seed >> 32);
        for (int round = 0; round < kPhiloxRounds; ++round) {
          const auto first = Mul(a, Set(bits, kPhiloxA)), second = Mul(c, Set(bits, kPhiloxB));
          const auto from_a = high_product(bits, a, kPhiloxA), from_c = high_product(bits, c, kPhiloxB);
          a = Xor(Xor(from_c, b), Set(bits, low)), b = second;
          c = Xor(Xor(from_a, e), Set(bits, high)), e = first;
          low += kPhiloxLow, high += kPhiloxHigh;
        }
      }
      const auto word = key % 4 == 0 ? a : key % 4 == 1 ? b : key % 4 == 2 ? c : e;
      StoreU(IfThenZeroElse(RebindMask(d, Lt(word, below)), kept), d, factors + j * wide + part);
    }
  }
  return true;
}

// Multiplies a panel of scores by `factors`.
inline void multiply_by(const float* factors, float* scores, Seen seen) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d)), wide = 2 * lanes;
  for (int64_t i = seen.begin * wide; i < seen.end * wide; i += lanes)
    StoreU(Mul(LoadU(d, scores + i), LoadU(d, factors + i)), d, scores + i);
}

// The panels of rows [row, row + count) of x, multiplied: [panel][size][queries].
template <class T>
void pack_rows(float* packed, const T* x, int64_t token, int64_t row, int64_t count, int64_t size, float scale) {
  const ScalableTag<float> d;
  const int64_t wide = panel_width(), lanes = wide / 2, all = (count + wide - 1) / wide * wide * size;
  pack(packed, x + row * token, count, size, token, int64_t{1}, wide);
  for (int64_t i = 0; i < all && scale != 1; i += lanes)
    StoreU(Mul(LoadU(d, packed + i), Set(d, scale)), d, packed + i);
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

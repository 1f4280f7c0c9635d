// The building blocks of matrix products: panels that stay in the caches, and a tile of the result that lives in
// registers while it is summed up. Included once per instruction set, as kernels/cpu/convert-inl.h is.
#ifndef DS_KERNELS_CPU_GEMM_PADDING
#define DS_KERNELS_CPU_GEMM_PADDING
#include <cstdint>
namespace ds::kernels::cpu {
constexpr int64_t kPadding = 64;  // no panel is wider
}  // namespace ds::kernels::cpu
#endif

#if defined(DS_KERNELS_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_KERNELS_CPU_GEMM_INL_H_
#undef DS_KERNELS_CPU_GEMM_INL_H_
#else
#define DS_KERNELS_CPU_GEMM_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

// Bytes of a mask, for pack().
template <class D>
HWY_INLINE Vec<D> load(D d, const uint8_t* p) {
  const Rebind<uint8_t, D> bytes;
  const RebindToSigned<D> whole;
  return ConvertTo(d, PromoteTo(whole, LoadU(bytes, p)));
}

inline float plain(uint8_t x) { return x; }
inline float plain(float x) { return x; }
inline float plain(Fp16 x) { return to_float(x); }
inline float plain(Bf16 x) { return to_float(x); }

// packed[p * wide + i] = x[i * along + p] for four i's, which are read side by side.
template <class T>
void pack_four(float* packed, const T* x, int64_t depth, int64_t along, int64_t wide) {
  const ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(Lanes(d));
  HWY_ALIGN float mixed[4 * cpu::kPadding];
  int64_t p = 0;
  for (; p + lanes <= depth; p += lanes) {
    const T* from = x + p;
    StoreInterleaved4(load(d, from), load(d, from + along), load(d, from + 2 * along), load(d, from + 3 * along), d,
                      mixed);
    for (int64_t q = 0; q < lanes; ++q) __builtin_memcpy(packed + (p + q) * wide, mixed + 4 * q, 4 * sizeof(float));
  }
  for (; p < depth; ++p)
    for (int64_t i = 0; i < 4; ++i) packed[p * wide + i] = plain(x[i * along + p]);
}

// Panels of `wide` numbers each: packed[panel][p][i] = x(panel * wide + i, p), for `count` numbers i and `depth` of p;
// zeros beyond. `along`: the distance of two i in memory, `across`: of two p; one of them is 1. Memory is read in its
// order, as far as that goes: with few rows of a, packing b is most of the work.
template <class T>
void pack(float* packed, const T* x, int64_t count, int64_t depth, int64_t along, int64_t across, int64_t wide) {
  const ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(Lanes(d));
  if (along == 1) {
    for (int64_t p = 0; p < depth; ++p) {
      const T* from = x + p * across;
      float* to = packed + p * wide;
      for (int64_t first = 0; first < count; first += wide, to += wide * depth) {
        const int64_t here = count - first < wide ? count - first : wide;
        int64_t i = 0;
        for (; i + lanes <= here; i += lanes) StoreU(load(d, from + first + i), d, to + i);
        for (; i < here; ++i) to[i] = plain(from[first + i]);
        for (; i < wide; ++i) to[i] = 0;
      }
    }
    return;
  }
  for (int64_t first = 0; first < count; first += wide, packed += wide * depth) {
    const int64_t here = count - first < wide ? count - first : wide;
    const T* from = x + first * along;
    int64_t i = 0;
    for (; i + 4 <= here; i += 4) pack_four(packed + i, from + i * along, depth, along, wide);
    for (; i < wide; ++i)
      for (int64_t p = 0; p < depth; ++p) packed[p * wide + i] = i < here ? plain(from[i * along + p]) : 0.0f;
  }
}

// c[i][j] += sum over p of a[p][i] * b[p][j] for a tile of kTileRows x two registers, of which `rows` x `columns` are
// c's; with `fresh` = instead of +=.
inline void add_tile(const float* a, const float* b, int64_t depth, float* c, int64_t stride, int64_t rows,
                     int64_t columns, bool fresh) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d));
  Vec<decltype(d)> left[kTileRows], right[kTileRows];
#pragma GCC unroll 12
  for (int i = 0; i < kTileRows; ++i) left[i] = right[i] = Zero(d);
  for (int64_t p = 0; p < depth; ++p, a += kTileRows, b += 2 * lanes) {
    const auto x = LoadU(d, b), y = LoadU(d, b + lanes);
#pragma GCC unroll 12
    for (int i = 0; i < kTileRows; ++i) {
      const auto z = Set(d, a[i]);
      left[i] = MulAdd(z, x, left[i]);
      right[i] = MulAdd(z, y, right[i]);
    }
  }
  if (fresh && rows == kTileRows && columns == 2 * lanes) {
#pragma GCC unroll 12
    for (int i = 0; i < kTileRows; ++i, c += stride) {
      StoreU(left[i], d, c);
      StoreU(right[i], d, c + lanes);
    }
    return;
  }
  if (rows == kTileRows && columns == 2 * lanes) {
#pragma GCC unroll 12
    for (int i = 0; i < kTileRows; ++i, c += stride) {
      StoreU(Add(LoadU(d, c), left[i]), d, c);
      StoreU(Add(LoadU(d, c + lanes), right[i]), d, c + lanes);
    }
    return;
  }
  HWY_ALIGN float whole[kTileRows * cpu::kPadding];
  for (int i = 0; i < kTileRows; ++i) {
    StoreU(left[i], d, whole + i * 2 * lanes);
    StoreU(right[i], d, whole + i * 2 * lanes + lanes);
  }
  for (int64_t i = 0; i < rows; ++i, c += stride)
    for (int64_t j = 0; j < columns; ++j) c[j] = (fresh ? 0.0f : c[j]) + whole[i * 2 * lanes + j];
}

// add_tile() for a b whose panels are one register wide.
inline void add_narrow_tile(const float* a, const float* b, int64_t depth, float* c, int64_t stride, int64_t rows,
                            int64_t columns, bool fresh) {
  const ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(Lanes(d));
  Vec<decltype(d)> sums[kTileRows];
#pragma GCC unroll 12
  for (int i = 0; i < kTileRows; ++i) sums[i] = Zero(d);
  for (int64_t p = 0; p < depth; ++p, a += kTileRows, b += lanes) {
    const auto x = LoadU(d, b);
#pragma GCC unroll 12
    for (int i = 0; i < kTileRows; ++i) sums[i] = MulAdd(Set(d, a[i]), x, sums[i]);
  }
  HWY_ALIGN float whole[cpu::kPadding];
#pragma GCC unroll 12
  for (int i = 0; i < kTileRows; ++i, c += stride) {
    if (i >= rows) continue;
    if (columns == lanes) {
      StoreU(fresh ? sums[i] : Add(LoadU(d, c), sums[i]), d, c);
      continue;
    }
    StoreU(sums[i], d, whole);
    for (int64_t j = 0; j < columns; ++j) c[j] = (fresh ? 0.0f : c[j]) + whole[j];
  }
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

// The sum of squares over many tensors. [Note: order of the sum of squares] in kernels/sum_order.h.
#include <type_traits>

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/norm.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"
#include "kernels/sum_order.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

template <class D, class T>
HWY_INLINE Vec<D> load_wide(D d, const T* p) {
  return PromoteTo(d, load(Rebind<float, D>(), p));
}
template <class D>
HWY_INLINE Vec<D> load_wide(D d, const double* p) {
  return LoadU(d, p);
}

inline double load_one(const double* p) { return *p; }
inline double load_one(const float* p) { return *p; }
inline double load_one(const Bf16* p) { return to_float(*p); }
inline double load_one(const Fp16* p) { return to_float(*p); }

// Lane i of the note is lane i % N of register i / N: every vector width adds the same numbers in the same order.
template <class T>
double block_elements(const T* data, size_t n) {
  const ScalableTag<double> d;
  constexpr size_t kWidth = MaxLanes(ScalableTag<double>());
  constexpr size_t kRegisters = kSumLanes / kWidth;
  Vec<decltype(d)> sums[kRegisters];
  for (size_t r = 0; r < kRegisters; ++r) sums[r] = Zero(d);
  size_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes) {
#pragma GCC unroll 16
    for (size_t r = 0; r < kRegisters; ++r) {
      const auto x = load_wide(d, data + i + r * kWidth);
      if constexpr (std::is_same_v<T, double>) {
        sums[r] = Add(sums[r], Mul(x, x));
      } else {
        sums[r] = MulAdd(x, x, sums[r]);  // the square is exact: fused or not, the sum is rounded once
      }
    }
  }
  double lanes[kSumLanes];
  for (size_t r = 0; r < kRegisters; ++r) StoreU(sums[r], d, lanes + r * kWidth);
  for (size_t lane = 0; i < n; ++i, ++lane) {
    const double x = load_one(data + i);
    lanes[lane] += x * x;
  }
  return sum_of_lanes(lanes);
}

double block_sum(const void* data, DType dtype, size_t begin, size_t n) {
  if (dtype == DType::kF64) return block_elements(static_cast<const double*>(data) + begin, n);
  double sum = 0;
  with_type(dtype, [&](auto type) { sum = block_elements(static_cast<const decltype(type)*>(data) + begin, n); });
  return sum;
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/entries.h"
#include "kernels/cpu/split.h"
#include "kernels/ref/ref.h"

namespace ds::kernels::cpu {
namespace {

template <Isa isa>
void sum_squares(const Launch& launch, const Segment* segments, size_t count, DType dtype, double* sum) {
  const auto body = DS_BODY(block_sum, isa);
  const auto block = [&](const Segment& seg, size_t index) {
    const size_t begin = index * kSumBlock;
    return body(seg.data, dtype, begin, std::min(kSumBlock, seg.numel - begin));
  };
  size_t blocks = 0;
  for (size_t s = 0; s < count; ++s) blocks += sum_blocks(segments[s].numel);
  double lanes[kSumBlockLanes] = {};
  if (launch.pool == nullptr || blocks * kSumBlock <= kInline) {
    size_t row = 0;
    for (size_t s = 0; s < count; ++s)
      for (size_t b = 0; b < sum_blocks(segments[s].numel); ++b) lanes[row++ % kSumBlockLanes] += block(segments[s], b);
    *sum += sum_of_lanes(lanes);
    return;
  }
  std::vector<size_t> ends(count);  // of each segment, in the row of all blocks
  for (size_t s = 0, end = 0; s < count; ++s) ends[s] = end += sum_blocks(segments[s].numel);
  std::vector<double> sums(blocks);
  launch.pool->parallel_for(blocks, 1, [&](size_t begin, size_t end) {
    size_t s = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (size_t b = begin; b < end; ++b) {
      while (b >= ends[s]) ++s;
      sums[b] = block(segments[s], b - (s == 0 ? 0 : ends[s - 1]));
    }
  });
  for (size_t b = 0; b < blocks; ++b) lanes[b % kSumBlockLanes] += sums[b];
  *sum += sum_of_lanes(lanes);
}

// Nearly always the sum of squares is finite, and then every element is.
template <Isa isa>
void find_nonfinite(const Launch& launch, const Checked* arrays, size_t count, DType dtype) {
  for (size_t a = 0; a < count; ++a) {
    const Segment all{const_cast<void*>(arrays[a].data), arrays[a].numel};
    double sum = 0;
    sum_squares<isa>(launch, &all, 1, dtype, &sum);
    if (!std::isfinite(sum)) ref::find_nonfinite(launch, arrays + a, 1, dtype);
  }
}

}  // namespace

const decltype(KernelTable::sum_squares) kSumSquares[kIsaCount] = DS_ENTRIES(sum_squares);
const decltype(KernelTable::find_nonfinite) kFindNonfinite[kIsaCount] = DS_ENTRIES(find_nonfinite);

}  // namespace ds::kernels::cpu
#endif

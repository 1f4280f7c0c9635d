// Sums of squares in the order of kernels/sum_order.h, for the instruction set that is being compiled.
#if defined(DS_KERNELS_CPU_SQUARES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_KERNELS_CPU_SQUARES_INL_H_
#undef DS_KERNELS_CPU_SQUARES_INL_H_
#else
#define DS_KERNELS_CPU_SQUARES_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/sum_order.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {
using namespace hwy::HWY_NAMESPACE;

// Adds the squares of x[i] to lanes[i % kSumLanes], in increasing i.
inline void add_squares(const float* x, size_t n, double* lanes) {
  const ScalableTag<double> d;
  const Rebind<float, decltype(d)> narrow;
  constexpr size_t kWidth = MaxLanes(ScalableTag<double>());
  constexpr size_t kRegisters = kSumLanes / kWidth;
  Vec<decltype(d)> sums[kRegisters];
  for (size_t r = 0; r < kRegisters; ++r) sums[r] = LoadU(d, lanes + r * kWidth);
  size_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes) {
#pragma GCC unroll 16
    for (size_t r = 0; r < kRegisters; ++r) {
      const auto wide = PromoteTo(d, LoadU(narrow, x + i + r * kWidth));
      sums[r] = MulAdd(wide, wide, sums[r]);  // the square is exact: fused or not, the sum is rounded once
    }
  }
  for (size_t r = 0; r < kRegisters; ++r) StoreU(sums[r], d, lanes + r * kWidth);
  for (size_t lane = 0; i < n; ++i, ++lane) lanes[lane] += static_cast<double>(x[i]) * x[i];
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

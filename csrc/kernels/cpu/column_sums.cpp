// Sums of magnitudes down the columns of a matrix: threads share the columns, so each is added up from its first row on
// by one of them.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/column_sums.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

inline double wide(double x) { return x; }
inline double wide(Bf16 x) { return to_float(x); }
inline double wide(Fp16 x) { return to_float(x); }

// Columns [begin, end); a row of the matrix is contiguous, which the compiler makes vectors of.
template <class T>
void add_columns(const T* data, size_t n, size_t first, size_t columns, size_t begin, size_t end, double* sums) {
  for (size_t row = 0; row < first + n; row += columns) {
    const size_t low = row + begin < first ? first : row + begin;
    const size_t high = row + end > first + n ? first + n : row + end;
    for (size_t at = low; at < high; ++at) {
      const double value = wide(data[at - first]);
      sums[at - row] += value < 0 ? -value : value;
    }
  }
}

void column_sums_range(const void* data, DType dtype, size_t n, size_t first, size_t columns, size_t begin, size_t end,
                       double* sums) {
  if (dtype == DType::kF64) {
    add_columns(static_cast<const double*>(data), n, first, columns, begin, end, sums);
    return;
  }
  with_type(dtype, [&](auto type) {
    add_columns(static_cast<const decltype(type)*>(data), n, first, columns, begin, end, sums);
  });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/entries.h"
#include "kernels/cpu/split.h"

namespace ds::kernels::cpu {
namespace {

template <Isa isa>
void column_sums(const Launch& launch, const void* data, DType dtype, size_t n, size_t first, size_t columns,
                 double* sums) {
  const auto body = [=](size_t begin, size_t end) {
    DS_BODY(column_sums_range, isa)(data, dtype, n, first, columns, begin, end, sums);
  };
  if (n == 0) return;
  if (launch.pool == nullptr || n <= kInline) return body(0, columns);
  launch.pool->parallel_for(columns, 64, body);
}

}  // namespace

const decltype(KernelTable::column_sums) kColumnSums[kIsaCount] = DS_ENTRIES(column_sums);

}  // namespace ds::kernels::cpu
#endif

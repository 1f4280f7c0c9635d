// Matrix products of many groups, cut into blocks that stay in the caches: a block of b is packed into panels as wide
// as two registers, a block of a into panels of kTileRows rows, and a tile of c lives in registers while it is summed
// up.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/grouped_gemm.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/gemm-inl.h"
#include "kernels/routes.h"

#ifndef DS_KERNELS_CPU_GEMM_BLOCKS
#define DS_KERNELS_CPU_GEMM_BLOCKS
namespace ds::kernels::cpu {
constexpr int64_t kBlockRows = 96, kBlockColumns = 256, kBlockDepth = 384;  // of c, c, and of both products' sums
}  // namespace ds::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

// c[m][columns], rows `stride` apart, += a times the columns [first, first + columns) of b; with `fresh` nobody has
// written c before.
template <class T>
void add_columns(const GemmGroup& g, GemmForm form, int64_t first, int64_t columns, float* c, int64_t stride,
                 float* packed_a, float* packed_b, bool fresh) {
  const int64_t wide = 2 * static_cast<int64_t>(Lanes(ScalableTag<float>()));
  const int64_t a_row = form.a_turned ? 1 : g.k, a_depth = form.a_turned ? g.m : 1;
  const int64_t b_column = form.b_turned ? g.k : 1, b_depth = form.b_turned ? 1 : g.n;
  const T *a = static_cast<const T*>(g.a), *b = static_cast<const T*>(g.b) + first * b_column;
  for (int64_t p = 0; p < g.k; p += cpu::kBlockDepth) {
    const int64_t depth = g.k - p < cpu::kBlockDepth ? g.k - p : cpu::kBlockDepth;
    pack(packed_b, b + p * b_depth, columns, depth, b_column, b_depth, wide);
    for (int64_t i = 0; i < g.m; i += cpu::kBlockRows) {
      const int64_t rows = g.m - i < cpu::kBlockRows ? g.m - i : cpu::kBlockRows;
      pack(packed_a, a + i * a_row + p * a_depth, rows, depth, a_row, a_depth, int64_t{kTileRows});
      for (int64_t j = 0; j < columns; j += wide)
        for (int64_t r = 0; r < rows; r += kTileRows)
          add_tile(packed_a + r * depth, packed_b + j * depth, depth, c + (i + r) * stride + j, stride,
                   rows - r < kTileRows ? rows - r : kTileRows, columns - j < wide ? columns - j : wide,
                   fresh && p == 0);
    }
  }
}

// The columns [first, first + columns) of one group's c. `sums`: m x columns numbers, for 16-bit results.
template <class T>
void columns_of(const GemmGroup& g, GemmForm form, int64_t first, int64_t columns, float* sums, float* packed_a,
                float* packed_b) {
  constexpr bool kDirect = sizeof(T) == sizeof(float);
  T* c = static_cast<T*>(g.c) + first;
  float* into = kDirect ? reinterpret_cast<float*>(c) : sums;
  const int64_t stride = kDirect ? g.n : columns;
  const T* bias = g.bias == nullptr ? nullptr : static_cast<const T*>(g.bias) + first;
  const bool fresh = bias == nullptr && g.k > 0;
  for (int64_t i = 0; i < g.m && !fresh; ++i)
    for (int64_t j = 0; j < columns; ++j) into[i * stride + j] = bias == nullptr ? 0.0f : plain(bias[j]);
  add_columns<T>(g, form, first, columns, into, stride, packed_a, packed_b, fresh);
  if constexpr (!kDirect)
    for (int64_t i = 0; i < g.m; ++i)
      each_element(columns,
                   [&](auto d, size_t j) HWY_ATTR { store(d, LoadU(d, sums + i * columns + j), c + i * g.n + j); });
}

void gemm_columns(const GemmGroup& g, GemmForm form, DType dtype, int64_t first, int64_t columns, float* sums,
                  float* packed_a, float* packed_b) {
  with_type(dtype, [&](auto type) { columns_of<decltype(type)>(g, form, first, columns, sums, packed_a, packed_b); });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/cpu/routes.h"
#include "kernels/ref/routes.h"

namespace ds::kernels::cpu {
namespace {

struct Columns {
  const GemmGroup* group;
  int64_t first, count;
};

template <Isa isa>
void grouped_gemm(const Launch& launch, const GemmGroup* groups, size_t count, GemmForm form, DType dtype) {
  if (dtype == DType::kF64) return ref::grouped_gemm(launch, groups, count, form, dtype);
  std::vector<Columns> parts;
  int64_t rows = 0, work = 0;
  for (const GemmGroup* g = groups; g != groups + count; ++g) {
    for (int64_t j = 0; j < g->n && g->m > 0; j += kBlockColumns)
      parts.push_back({g, j, std::min(kBlockColumns, g->n - j)});
    rows = std::max(rows, g->m);
    work += g->m * g->n * std::max<int64_t>(g->k, 1);
  }
  const auto body = [&](size_t begin, size_t end) {
    std::unique_ptr<float[]> packed(new float[(kBlockRows + kBlockColumns + 2 * kPadding) * kBlockDepth]);
    std::unique_ptr<float[]> sums(dtype == DType::kF32 ? nullptr : new float[rows * kBlockColumns]);
    for (size_t i = begin; i < end; ++i) DS_BODY(gemm_columns, isa)
    (*parts[i].group, form, dtype, parts[i].first, parts[i].count, sums.get(), packed.get(),
     packed.get() + (kBlockRows + kPadding) * kBlockDepth);
  };
  if (parts.empty()) return;
  const bool alone = launch.pool == nullptr || work < 1 << 20;  // less than a wake-up costs
  if (alone) return body(0, parts.size());
  launch.pool->parallel_for(parts.size(), 1, body);
}

}  // namespace

const decltype(RouteKernels::grouped_gemm) kGroupedGemm[kIsaCount] = DS_ENTRIES(grouped_gemm);

}  // namespace ds::kernels::cpu
#endif

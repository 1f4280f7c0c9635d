// Plain loops of copies between dtypes.
#include "kernels/ref/element.h"
#include "kernels/ref/ref.h"

namespace ds::kernels::ref {

void copy(const Launch&, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, float scale) {
  const bool wide = dst_dtype == DType::kF64 || src_dtype == DType::kF64;
  for (size_t i = 0; i < n; ++i) {
    const double x = load(src, src_dtype, i);
    store(dst, dst_dtype, i, wide ? x * scale : static_cast<float>(x) * scale);
  }
}

void accumulate(const Launch&, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, float scale) {
  const bool wide = dst_dtype == DType::kF64 || src_dtype == DType::kF64;
  for (size_t i = 0; i < n; ++i) {
    const double x = load(src, src_dtype, i), old = load(dst, dst_dtype, i);
    if (wide) {
      store(dst, dst_dtype, i, old + x * scale);
    } else {
      const float scaled = static_cast<float>(x) * scale;
      store(dst, dst_dtype, i, static_cast<float>(old) + scaled);
    }
  }
}

void move_all(const Launch& launch, const Move* moves, size_t count, DType to, DType from, float scale, bool add) {
  for (size_t i = 0; i < count; ++i)
    (add ? accumulate : copy)(launch, moves[i].to, to, moves[i].from, from, moves[i].numel, scale);
}

}  // namespace ds::kernels::ref

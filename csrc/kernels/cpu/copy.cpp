// dst = src * scale and dst += src * scale, converting between element types.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/copy.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

template <bool kAdd, class Dst, class Src>
void copy_elements(Dst* dst, const Src* src, size_t n, float scale) {
  each_element(n, [&](auto d, size_t i) HWY_ATTR {
    auto v = Mul(load(d, src + i), Set(d, scale));
    if constexpr (kAdd) v = Add(load(d, dst + i), v);
    store(d, v, dst + i);
  });
}

template <bool kAdd>
void copy_any(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t begin, size_t end, float scale) {
  with_type(dst_dtype, [&](auto to) {
    with_type(src_dtype, [&](auto from) {
      copy_elements<kAdd>(static_cast<decltype(to)*>(dst) + begin, static_cast<const decltype(from)*>(src) + begin,
                          end - begin, scale);
    });
  });
}

void copy_range(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t begin, size_t end, float scale) {
  copy_any<false>(dst, dst_dtype, src, src_dtype, begin, end, scale);
}

void accumulate_range(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t begin, size_t end,
                      float scale) {
  copy_any<true>(dst, dst_dtype, src, src_dtype, begin, end, scale);
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cstring>

#include "kernels/cpu/entries.h"
#include "kernels/cpu/split.h"
#include "kernels/ref/ref.h"

namespace ds::kernels::cpu {
namespace {

char* at(void* data, DType dtype, size_t i) { return static_cast<char*>(data) + i * dtype_bytes(dtype); }
const char* at(const void* data, DType dtype, size_t i) {
  return static_cast<const char*>(data) + i * dtype_bytes(dtype);
}

template <Isa isa>
void copy(const Launch& launch, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, float scale) {
  const bool same = dst_dtype == src_dtype && scale == 1.0f;
  if (same && dst == src) return;
  const bool wide = dst_dtype == DType::kF64 || src_dtype == DType::kF64;
  split(launch, n, [=](size_t begin, size_t end) {
    if (same) {
      std::memcpy(at(dst, dst_dtype, begin), at(src, src_dtype, begin), (end - begin) * dtype_bytes(dst_dtype));
    } else if (wide) {  // fp64 is rare: the plain loops will do
      ref::copy({}, at(dst, dst_dtype, begin), dst_dtype, at(src, src_dtype, begin), src_dtype, end - begin, scale);
    } else {
      DS_BODY(copy_range, isa)(dst, dst_dtype, src, src_dtype, begin, end, scale);
    }
  });
}

template <Isa isa>
void accumulate(const Launch& launch, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n,
                float scale) {
  const bool wide = dst_dtype == DType::kF64 || src_dtype == DType::kF64;
  split(launch, n, [=](size_t begin, size_t end) {
    if (wide) {
      ref::accumulate({}, at(dst, dst_dtype, begin), dst_dtype, at(src, src_dtype, begin), src_dtype, end - begin,
                      scale);
    } else {
      DS_BODY(accumulate_range, isa)(dst, dst_dtype, src, src_dtype, begin, end, scale);
    }
  });
}

template <Isa isa>
void move_all(const Launch& launch, const Move* moves, size_t count, DType to, DType from, float scale, bool add) {
  for (size_t i = 0; i < count; ++i)
    (add ? accumulate<isa> : copy<isa>)(launch, moves[i].to, to, moves[i].from, from, moves[i].numel, scale);
}

}  // namespace

const decltype(KernelTable::copy) kCopy[kIsaCount] = DS_ENTRIES(copy);
const decltype(KernelTable::accumulate) kAccumulate[kIsaCount] = DS_ENTRIES(accumulate);
const decltype(KernelTable::move_all) kMoveAll[kIsaCount] = DS_ENTRIES(move_all);

}  // namespace ds::kernels::cpu
#endif

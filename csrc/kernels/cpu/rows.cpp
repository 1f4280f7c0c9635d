// permute_rows, combine_rows, dot_rows of kernels/routes.h.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rows.cpp"
#include <cstring>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

template <class T>
void scaled_row(T* out, const T* src, size_t width, float weight) {
  each_element(width, [&](auto d, size_t i) HWY_ATTR { store(d, Mul(load(d, src + i), Set(d, weight)), out + i); });
}

// Rows lie where no hardware looks ahead: asks for the one that is two turns away.
inline void ask_for(const void* src, const int32_t* index, int64_t divisor, size_t bytes, size_t r, size_t end) {
  if (r + 2 >= end || index[r + 2] < 0) return;
  const char* row = static_cast<const char*>(src) + index[r + 2] / divisor * bytes;
  for (size_t at = 0; at < bytes && at < 2048; at += 64) __builtin_prefetch(row + at);
}

void permute_range(void* out, const void* src, DType dtype, size_t width, const int32_t* index, const float* weight,
                   int64_t divisor, size_t begin, size_t end) {
  const size_t bytes = width * dtype_bytes(dtype);
  for (size_t r = begin; r < end; ++r) {
    ask_for(src, index, divisor, bytes, r, end);
    char* to = static_cast<char*>(out) + r * bytes;
    if (index[r] < 0) {
      std::memset(to, 0, bytes);
      continue;
    }
    const char* from = static_cast<const char*>(src) + index[r] / divisor * bytes;
    if (weight == nullptr) {
      std::memcpy(to, from, bytes);
    } else if (dtype == DType::kF64) {
      for (size_t i = 0; i < width; ++i)
        reinterpret_cast<double*>(to)[i] = reinterpret_cast<const double*>(from)[i] * weight[index[r]];
    } else {
      with_type(dtype, [&](auto type) {
        using T = decltype(type);
        scaled_row(reinterpret_cast<T*>(to), reinterpret_cast<const T*>(from), width, weight[index[r]]);
      });
    }
  }
}

template <class T>
void combined_row(T* out, const T* src, size_t width, size_t k, const int32_t* slot, const float* weight) {
  each_element(width, [&](auto d, size_t i) HWY_ATTR {
    auto sum = Zero(d);
    for (size_t j = 0; j < k; ++j) {
      if (slot[j] < 0) continue;
      const auto x = load(d, src + static_cast<size_t>(slot[j]) * width + i);
      sum = Add(sum, weight == nullptr ? x : Mul(x, Set(d, weight[j])));
    }
    store(d, sum, out + i);
  });
}

void combine_range(void* out, const void* src, DType dtype, size_t width, size_t k, const int32_t* slot,
                   const float* weight, size_t begin, size_t end) {
  for (size_t t = begin; t < end; ++t) {
    const int32_t* of_token = slot + t * k;
    const float* weights = weight == nullptr ? nullptr : weight + t * k;
    if (dtype == DType::kF64) {
      for (size_t i = 0; i < width; ++i) {
        double sum = 0;
        for (size_t j = 0; j < k; ++j)
          if (of_token[j] >= 0)
            sum += static_cast<const double*>(src)[of_token[j] * width + i] * (weights != nullptr ? weights[j] : 1);
        static_cast<double*>(out)[t * width + i] = sum;
      }
    } else {
      with_type(dtype, [&](auto type) {
        using T = decltype(type);
        combined_row(static_cast<T*>(out) + t * width, static_cast<const T*>(src), width, k, of_token, weights);
      });
    }
  }
}

template <class T>
float dot(const T* a, const T* b, size_t width) {
  const ScalableTag<float> d;
  const size_t lanes = Lanes(d);
  auto x = Zero(d), y = x;  // two sums hide the latency of the addition
  size_t i = 0;
  for (; i + 2 * lanes <= width; i += 2 * lanes) {
    x = MulAdd(load(d, a + i), load(d, b + i), x);
    y = MulAdd(load(d, a + i + lanes), load(d, b + i + lanes), y);
  }
  float rest = 0;
  const CappedTag<float, 1> one;
  for (; i < width; ++i) rest += GetLane(Mul(load(one, a + i), load(one, b + i)));
  return GetLane(SumOfLanes(d, Add(x, y))) + rest;
}

void dot_range(float* out, const void* src, const void* grad, DType dtype, size_t width, size_t k, const int32_t* slot,
               size_t begin, size_t end) {
  for (size_t a = begin; a < end; ++a) {
    out[a] = 0;
    if (slot[a] < 0) continue;
    const size_t x = static_cast<size_t>(slot[a]) * width, y = a / k * width;
    if (dtype == DType::kF64) {
      double sum = 0;
      for (size_t i = 0; i < width; ++i)
        sum += static_cast<const double*>(src)[x + i] * static_cast<const double*>(grad)[y + i];
      out[a] = static_cast<float>(sum);
    } else {
      with_type(dtype, [&](auto type) {
        using T = decltype(type);
        out[a] = dot(static_cast<const T*>(src) + x, static_cast<const T*>(grad) + y, width);
      });
    }
  }
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/routes.h"
#include "kernels/cpu/split.h"

namespace ds::kernels::cpu {
namespace {

// Calls body(begin, end) for runs of rows of `width` elements.
template <typename Body>
void split_rows(const Launch& launch, size_t rows, size_t width, const Body& body) {
  if (rows == 0) return;
  if (launch.pool == nullptr || rows * width <= kInline) return body(size_t{0}, rows);
  launch.pool->parallel_for(rows, std::max<size_t>(1, kGrain / std::max<size_t>(1, width)), std::cref(body));
}

template <Isa isa>
void permute_rows(const Launch& launch, void* out, const void* src, DType dtype, size_t width, size_t rows,
                  const int32_t* index, const float* weight, int64_t divisor) {
  split_rows(launch, rows, width, [=](size_t begin, size_t end) {
    DS_BODY(permute_range, isa)(out, src, dtype, width, index, weight, divisor, begin, end);
  });
}

template <Isa isa>
void combine_rows(const Launch& launch, void* out, const void* src, DType dtype, size_t width, size_t tokens, size_t k,
                  const int32_t* slot, const float* weight) {
  split_rows(launch, tokens, width * k, [=](size_t begin, size_t end) {
    DS_BODY(combine_range, isa)(out, src, dtype, width, k, slot, weight, begin, end);
  });
}

template <Isa isa>
void dot_rows(const Launch& launch, float* out, const void* src, const void* grad, DType dtype, size_t width,
              size_t tokens, size_t k, const int32_t* slot) {
  split_rows(launch, tokens * k, width, [=](size_t begin, size_t end) {
    DS_BODY(dot_range, isa)(out, src, grad, dtype, width, k, slot, begin, end);
  });
}

}  // namespace

const decltype(RouteKernels::permute_rows) kPermuteRows[kIsaCount] = DS_ENTRIES(permute_rows);
const decltype(RouteKernels::combine_rows) kCombineRows[kIsaCount] = DS_ENTRIES(combine_rows);
const decltype(RouteKernels::dot_rows) kDotRows[kIsaCount] = DS_ENTRIES(dot_rows);

}  // namespace ds::kernels::cpu
#endif

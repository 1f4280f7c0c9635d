// Norms (kernels/layer_ops.h) for each instruction set.
#include "kernels/layer_ops.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/layer_norm.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

// The sum of step(d, i) over n elements: vectors of fp32, and single elements at the end.
template <class Step>
HWY_INLINE float sum_over(size_t n, const Step& step) {
  const ScalableTag<float> d;
  const size_t lanes = Lanes(d);
  auto one = Zero(d), two = Zero(d);  // neither waits for the other
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    one = Add(one, step(d, i));
    two = Add(two, step(d, i + lanes));
  }
  float sum = GetLane(SumOfLanes(d, Add(one, two)));
  const CappedTag<float, 1> single;
  for (; i < n; ++i) sum += GetLane(step(single, i));
  return sum;
}

// row: `size` floats.
template <class T>
void norm_rows(const NormRows& n, const NormInputs& in, const NormOutputs& out, size_t begin, size_t end, float* row) {
  const auto *bias = static_cast<const T*>(in.bias), *weight = static_cast<const T*>(in.weight),
             *shift = static_cast<const T*>(in.shift);
  const float inverse = 1.0f / static_cast<float>(n.size);
  for (size_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(in.x) + r * n.size;
    const T* residual = in.residual != nullptr ? static_cast<const T*>(in.residual) + r * n.size : nullptr;
    T* sums = out.sum != nullptr ? static_cast<T*>(out.sum) + r * n.size : nullptr;
    T* y = static_cast<T*>(out.y) + r * n.size;
    each_element(n.size, [&](auto d, size_t i) HWY_ATTR {
      auto v = load(d, x + i);
      if (bias != nullptr) v = Add(v, load(d, bias + i));
      if (residual != nullptr) v = Add(v, load(d, residual + i));
      if (sums != nullptr) {
        store(d, v, sums + i);
        v = load(d, sums + i);  // what backward reads
      }
      StoreU(v, d, row + i);
    });
    const float mean =
        n.centered ? sum_over(n.size, [&](auto d, size_t i) HWY_ATTR { return LoadU(d, row + i); }) * inverse : 0.0f;
    const float square = sum_over(n.size, [&](auto d, size_t i) HWY_ATTR {
      const auto v = Sub(LoadU(d, row + i), Set(d, mean));
      return Mul(v, v);
    });
    const float scale = 1.0f / __builtin_sqrtf(square * inverse + n.eps);
    each_element(n.size, [&](auto d, size_t i) HWY_ATTR {
      auto v = Mul(Sub(LoadU(d, row + i), Set(d, mean)), Set(d, scale));
      if (weight != nullptr) v = Mul(v, load(d, weight + i));
      if (shift != nullptr) v = Add(v, load(d, shift + i));
      store(d, v, y + i);
    });
    if (out.mean != nullptr) static_cast<float*>(out.mean)[r] = mean;
    if (out.scale != nullptr) static_cast<float*>(out.scale)[r] = scale;
  }
}

void norm_range(const NormRows& n, const NormInputs& in, const NormOutputs& out, size_t begin, size_t end, float* row) {
  with_type(n.dtype, [&](auto type) { norm_rows<decltype(type)>(n, in, out, begin, end, row); });
}

// sums: 2 * size floats that grow by the gradients of weight and shift of these rows, or null; row: 2 * size floats.
template <class T>
void norm_backward_rows(const NormRows& n, const NormGradients& g, size_t begin, size_t end, float* sums, float* row) {
  const auto *weight = static_cast<const T*>(g.weight), *shift = static_cast<const T*>(g.shift);
  const float inverse = 1.0f / static_cast<float>(n.size);
  float *unit = row, *above = row + n.size;
  for (size_t r = begin; r < end; ++r) {
    const float mean = g.mean != nullptr ? static_cast<const float*>(g.mean)[r] : 0.0f,
                scale = static_cast<const float*>(g.scale)[r];
    const T* dy = static_cast<const T*>(g.dy) + r * n.size;
    const T* given = static_cast<const T*>(g.x != nullptr ? g.x : g.y) + r * n.size;
    const T* more = g.more != nullptr ? static_cast<const T*>(g.more) + r * n.size : nullptr;
    each_element(n.size, [&](auto d, size_t i) HWY_ATTR {
      const auto w = weight != nullptr ? load(d, weight + i) : Set(d, 1.0f);
      auto u = load(d, given + i);
      if (g.x != nullptr) {
        u = Mul(Sub(u, Set(d, mean)), Set(d, scale));
      } else {
        u = Div(shift != nullptr ? Sub(u, load(d, shift + i)) : u, w);
      }
      const auto upper = load(d, dy + i);
      StoreU(u, d, unit + i);
      StoreU(Mul(upper, w), d, above + i);
      if (sums == nullptr) return;
      StoreU(Add(LoadU(d, sums + i), Mul(upper, u)), d, sums + i);
      StoreU(Add(LoadU(d, sums + n.size + i), upper), d, sums + n.size + i);
    });
    const float sum =
        n.centered ? sum_over(n.size, [&](auto d, size_t i) HWY_ATTR { return LoadU(d, above + i); }) * inverse : 0.0f;
    const float product =
        sum_over(n.size, [&](auto d, size_t i) HWY_ATTR { return Mul(LoadU(d, above + i), LoadU(d, unit + i)); }) *
        inverse;
    T* dx = static_cast<T*>(g.dx) + r * n.size;
    each_element(n.size, [&](auto d, size_t i) HWY_ATTR {
      auto v = Sub(Sub(LoadU(d, above + i), Set(d, sum)), Mul(LoadU(d, unit + i), Set(d, product)));
      v = Mul(v, Set(d, scale));
      if (more != nullptr) v = Add(v, load(d, more + i));
      store(d, v, dx + i);
    });
  }
}

void norm_backward_range(const NormRows& n, const NormGradients& g, size_t begin, size_t end, float* sums, float* row) {
  with_type(n.dtype, [&](auto type) { norm_backward_rows<decltype(type)>(n, g, begin, end, sums, row); });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <vector>

#include "kernels/cpu/layer_ops.h"
#include "kernels/cpu/split.h"
#include "kernels/ref/layer_ops.h"

namespace ds::kernels::cpu {
namespace {

template <Isa isa>
void norm(const Launch& launch, const NormRows& n, const NormInputs& in, const NormOutputs& out) {
  if (n.dtype == DType::kF64) return ref::norm(launch, n, in, out);
  split_rows(launch, n.rows, n.size, [&](size_t begin, size_t end) {
    std::vector<float> row(n.size);
    DS_BODY(norm_range, isa)(n, in, out, begin, end, row.data());
  });
}

template <Isa isa>
void norm_backward(const Launch& launch, const NormRows& n, const NormGradients& g) {
  if (n.dtype == DType::kF64) return ref::norm_backward(launch, n, g);
  if (n.rows == 0 && g.dweight == nullptr) return;
  const size_t parts = std::max<size_t>(1, std::min(kNormParts, n.rows / row_grain(n.size))),
               each = (n.rows + parts - 1) / parts;
  auto* sums = static_cast<float*>(g.parts);
  if (sums != nullptr) std::fill_n(sums, parts * 2 * n.size, 0.0f);
  const auto body = [&](size_t begin, size_t end) {
    std::vector<float> row(2 * n.size);
    for (size_t p = begin; p < end; ++p) {
      float* own = sums != nullptr ? sums + p * 2 * n.size : nullptr;
      DS_BODY(norm_backward_range, isa)
      (n, g, std::min(n.rows, p * each), std::min(n.rows, (p + 1) * each), own, row.data());
    }
  };
  if (launch.pool == nullptr || n.rows * n.size <= kInline) {
    body(0, parts);
  } else {
    launch.pool->parallel_for(parts, 1, body);
  }
  if (sums == nullptr) return;
  for (size_t part = 1; part < parts; ++part)
    for (size_t i = 0; i < 2 * n.size; ++i) sums[i] += sums[part * 2 * n.size + i];
  std::copy_n(sums, n.size, static_cast<float*>(g.dweight));
  std::copy_n(sums + n.size, n.size, static_cast<float*>(g.dshift));
}

}  // namespace

const decltype(LayerKernels::norm) kNorm[kIsaCount] = DS_ENTRIES(norm);
const decltype(LayerKernels::norm_backward) kNormBackward[kIsaCount] = DS_ENTRIES(norm_backward);

}  // namespace ds::kernels::cpu
#endif

// Activations, and dropout with a bias and a residual (kernels/layer_ops.h), for each instruction set.
#include "kernels/layer_ops.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/activations.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/random-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::kernels::HWY_NAMESPACE {

constexpr float kRoot = 0.7978845608f, kCube = 0.044715f, kHalfRoot = 0.7071067812f, kDensity = 0.3989422804f;

// The value and the derivative of an activation.
template <Activation kKind, class D, class V = Vec<D>>
HWY_INLINE V value_of(D d, V x) {
  const V half = Mul(x, Set(d, 0.5f)), one = Set(d, 1.0f);
  if constexpr (kKind == Activation::kGeluTanh) {
    const V inner = Mul(Mul(x, MulAdd(Mul(x, x), Set(d, kCube), one)), Set(d, kRoot));
    return MulAdd(half, tanh_of(d, inner), half);
  } else if constexpr (kKind == Activation::kGelu) {
    return MulAdd(half, erf_of(d, Mul(x, Set(d, kHalfRoot))), half);
  } else if constexpr (kKind == Activation::kRelu) {
    return IfThenZeroElse(Le(x, Zero(d)), x);  // a nan stays one
  } else {
    return Mul(x, sigmoid_of(d, x));
  }
}
template <Activation kKind, class D, class V = Vec<D>>
HWY_INLINE V slope_of(D d, V x) {
  const V half = Set(d, 0.5f), one = Set(d, 1.0f);
  if constexpr (kKind == Activation::kGeluTanh) {
    const V square = Mul(x, x), inner = Mul(Mul(x, MulAdd(square, Set(d, kCube), one)), Set(d, kRoot));
    const V t = tanh_of(d, inner), rise = Mul(MulAdd(square, Set(d, 3 * kCube), one), Set(d, kRoot));
    return Mul(half, Add(Add(one, t), Mul(Mul(x, Sub(one, Mul(t, t))), rise)));
  } else if constexpr (kKind == Activation::kGelu) {
    const V density = Mul(exp_of(d, Mul(Mul(x, x), Set(d, -0.5f))), Set(d, kDensity));
    return MulAdd(x, density, MulAdd(half, erf_of(d, Mul(x, Set(d, kHalfRoot))), half));
  } else if constexpr (kKind == Activation::kRelu) {
    return IfThenElseZero(Gt(x, Zero(d)), one);
  } else {
    const V s = sigmoid_of(d, x);
    return Mul(s, MulAdd(x, Sub(one, s), one));
  }
}

template <class T>
struct Operands {
  const T *dy, *x, *bias;
  T* out;
};

template <Activation kKind, class T>
void activate_rows(const ActivationRows& a, const Operands<T>& o, size_t begin, size_t end) {
  const size_t across = a.gated ? 2 * a.size : a.size;
  for (size_t r = begin; r < end; ++r) {
    const T *x = o.x + r * across, *second = x + a.size, *bias = o.bias, *more = bias + a.size;
    T* y = o.out + r * a.size;
    each_element(a.size, [&](auto d, size_t i) HWY_ATTR {
      auto gate = load(d, x + i);
      if (bias != nullptr) gate = Add(gate, load(d, bias + i));
      auto v = value_of<kKind>(d, gate);
      if (a.gated) {
        auto value = load(d, second + i);
        if (bias != nullptr) value = Add(value, load(d, more + i));
        v = Mul(v, value);
      }
      store(d, v, y + i);
    });
  }
}

template <Activation kKind, class T>
void activate_back_rows(const ActivationRows& a, const Operands<T>& o, size_t begin, size_t end) {
  const size_t across = a.gated ? 2 * a.size : a.size;
  for (size_t r = begin; r < end; ++r) {
    const T *x = o.x + r * across, *second = x + a.size, *bias = o.bias, *more = bias + a.size, *dy = o.dy + r * a.size;
    T* dx = o.out + r * across;
    each_element(a.size, [&](auto d, size_t i) HWY_ATTR {
      auto gate = load(d, x + i);
      if (bias != nullptr) gate = Add(gate, load(d, bias + i));
      const auto upper = load(d, dy + i);
      auto down = Mul(upper, slope_of<kKind>(d, gate));
      if (a.gated) {
        auto value = load(d, second + i);
        if (bias != nullptr) value = Add(value, load(d, more + i));
        store(d, Mul(upper, value_of<kKind>(d, gate)), dx + a.size + i);
        down = Mul(down, value);
      }
      store(d, down, dx + i);
    });
  }
}

template <Activation kKind>
void activate_as(const ActivationRows& a, const void* dy, const void* x, const void* bias, void* out, size_t begin,
                 size_t end) {
  with_type(a.dtype, [&](auto type) {
    using T = decltype(type);
    const Operands<T> o = {static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const T*>(bias),
                           static_cast<T*>(out)};
    dy == nullptr ? activate_rows<kKind>(a, o, begin, end) : activate_back_rows<kKind>(a, o, begin, end);
  });
}

// dy null: forward.
void activation_range(const ActivationRows& a, const void* dy, const void* x, const void* bias, void* out, size_t begin,
                      size_t end) {
  switch (a.kind) {
    case Activation::kGeluTanh: return activate_as<Activation::kGeluTanh>(a, dy, x, bias, out, begin, end);
    case Activation::kGelu: return activate_as<Activation::kGelu>(a, dy, x, bias, out, begin, end);
    case Activation::kRelu: return activate_as<Activation::kRelu>(a, dy, x, bias, out, begin, end);
    case Activation::kSilu: return activate_as<Activation::kSilu>(a, dy, x, bias, out, begin, end);
  }
}

// factors: of `size` elements of a row, and memory of 4 vectors behind them. Four neighbours share a counter.
inline void row_factors(const RowDropout& drop, uint32_t row, size_t size, float* factors) {
  const ScalableTag<float> d;
  const RebindToUnsigned<decltype(d)> bits;
  const size_t lanes = Lanes(d);
  const auto kept = Set(d, drop.kept);
  const auto below = Set(bits, drop.below);
  const auto factor = [&](auto word) HWY_ATTR { return IfThenZeroElse(RebindMask(d, Lt(word, below)), kept); };
  for (size_t i = 0; i < size; i += 4 * lanes) {
    const auto words =
        philox_of(bits, {Iota(bits, static_cast<uint32_t>(i / 4)), Set(bits, row), Zero(bits), Set(bits, drop.stream)},
                  drop.seed);
    StoreInterleaved4(factor(words.a), factor(words.b), factor(words.c), factor(words.d), d, factors + i);
  }
}

void dropout_range(const RowDropout& drop, DType dtype, size_t size, const void* x, const void* bias,
                   const void* residual, void* y, size_t begin, size_t end, float* factors) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const auto* more = static_cast<const T*>(bias);
    for (size_t r = begin; r < end; ++r) {
      const T* from = static_cast<const T*>(x) + r * size;
      const T* add = residual != nullptr ? static_cast<const T*>(residual) + r * size : nullptr;
      T* to = static_cast<T*>(y) + r * size;
      if (drop.kept != 0) row_factors(drop, static_cast<uint32_t>(r), size, factors);
      each_element(size, [&](auto d, size_t i) HWY_ATTR {
        auto v = load(d, from + i);
        if (more != nullptr) v = Add(v, load(d, more + i));
        if (drop.kept != 0) v = Mul(v, LoadU(d, factors + i));
        if (add != nullptr) v = Add(v, load(d, add + i));
        store(d, v, to + i);
      });
    }
  });
}

}  // namespace ds::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <vector>

#include "kernels/cpu/layer_ops.h"
#include "kernels/cpu/split.h"
#include "kernels/ref/layer_ops.h"

namespace ds::kernels::cpu {
namespace {

constexpr size_t kMostLanes = 16;  // of a register of fp32

template <Isa isa>
void activation(const Launch& launch, const ActivationRows& a, const void* x, const void* bias, void* y) {
  if (a.dtype == DType::kF64) return ref::activation(launch, a, x, bias, y);
  split_rows(launch, a.rows, a.size, [&](size_t begin, size_t end) {
    DS_BODY(activation_range, isa)(a, nullptr, x, bias, y, begin, end);
  });
}

template <Isa isa>
void activation_backward(const Launch& launch, const ActivationRows& a, const void* dy, const void* x, const void* bias,
                         void* dx) {
  if (a.dtype == DType::kF64) return ref::activation_backward(launch, a, dy, x, bias, dx);
  split_rows(launch, a.rows, a.size, [&](size_t begin, size_t end) {
    DS_BODY(activation_range, isa)(a, dy, x, bias, dx, begin, end);
  });
}

template <Isa isa>
void dropout(const Launch& launch, const RowDropout& drop, DType dtype, size_t rows, size_t size, const void* x,
             const void* bias, const void* residual, void* y) {
  if (dtype == DType::kF64) return ref::dropout(launch, drop, dtype, rows, size, x, bias, residual, y);
  split_rows(launch, rows, size, [&](size_t begin, size_t end) {
    std::vector<float> factors(drop.kept != 0 ? size + 4 * kMostLanes : 0);
    DS_BODY(dropout_range, isa)(drop, dtype, size, x, bias, residual, y, begin, end, factors.data());
  });
}

}  // namespace

const decltype(LayerKernels::activation) kActivation[kIsaCount] = DS_ENTRIES(activation);
const decltype(LayerKernels::activation_backward) kActivationBackward[kIsaCount] = DS_ENTRIES(activation_backward);
const decltype(LayerKernels::dropout) kDropout[kIsaCount] = DS_ENTRIES(dropout);

}  // namespace ds::kernels::cpu
#endif

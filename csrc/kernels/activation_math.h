// The formulas of kernels/layer_ops.h for one element, for plain loops and GPUs.
#pragma once
#include <cmath>

#include "kernels/layer_ops.h"

namespace ds::kernels {

// GELU with tanh: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). Hendrycks and Gimpel 2016.
constexpr double kGeluRoot = 0.7978845608028654, kGeluCube = 0.044715, kRootHalf = 0.7071067811865476,
                 kNormalDensity = 0.3989422804014327;

template <typename T>
DS_HOST_DEVICE inline T activated(Activation kind, T x) {
  switch (kind) {
    case Activation::kGeluTanh: return T(0.5) * x * (1 + tanh(T(kGeluRoot) * (x + T(kGeluCube) * x * x * x)));
    case Activation::kGelu: return T(0.5) * x * (1 + erf(x * T(kRootHalf)));
    case Activation::kRelu: return x > 0 || x != x ? x : T(0);
    case Activation::kSilu: return x / (1 + exp(-x));
  }
  return x;
}

template <typename T>
DS_HOST_DEVICE inline T activation_slope(Activation kind, T x) {
  switch (kind) {
    case Activation::kGeluTanh: {
      const T inner = T(kGeluRoot) * (x + T(kGeluCube) * x * x * x), t = tanh(inner);
      return T(0.5) * (1 + t) + T(0.5) * x * (1 - t * t) * T(kGeluRoot) * (1 + 3 * T(kGeluCube) * x * x);
    }
    case Activation::kGelu: return T(0.5) * (1 + erf(x * T(kRootHalf))) + x * T(kNormalDensity) * exp(T(-0.5) * x * x);
    case Activation::kRelu: return x > 0 ? T(1) : T(0);
    case Activation::kSilu: {
      const T s = 1 / (1 + exp(-x));
      return s * (1 + x * (1 - s));
    }
  }
  return T(1);
}

}  // namespace ds::kernels

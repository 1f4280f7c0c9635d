#include "kernels/ref/layer_ops.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/activation_math.h"
#include "kernels/ref/element.h"

namespace ds::kernels::ref {
namespace {

DType wide_of(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

double load_or(const void* data, DType dtype, size_t i, double other) {
  return data != nullptr ? load(data, dtype, i) : other;
}

}  // namespace

void norm(const Launch&, const NormRows& n, const NormInputs& in, const NormOutputs& out) {
  std::vector<double> row(n.size);
  for (size_t r = 0; r < n.rows; ++r) {
    double mean = 0, square = 0;
    for (size_t i = 0; i < n.size; ++i) {
      const size_t at = r * n.size + i;
      row[i] = load(in.x, n.dtype, at) + load_or(in.bias, n.dtype, i, 0) + load_or(in.residual, n.dtype, at, 0);
      if (out.sum != nullptr) {
        store(out.sum, n.dtype, at, row[i]);
        row[i] = load(out.sum, n.dtype, at);  // what backward reads
      }
      mean += row[i] / static_cast<double>(n.size);
    }
    if (!n.centered) mean = 0;
    for (double x : row) square += (x - mean) * (x - mean) / static_cast<double>(n.size);
    const double scale = 1 / std::sqrt(square + n.eps);
    for (size_t i = 0; i < n.size; ++i)
      store(out.y, n.dtype, r * n.size + i,
            (row[i] - mean) * scale * load_or(in.weight, n.dtype, i, 1) + load_or(in.shift, n.dtype, i, 0));
    if (out.mean != nullptr) store(out.mean, wide_of(n.dtype), r, mean);
    if (out.scale != nullptr) store(out.scale, wide_of(n.dtype), r, scale);
  }
}

void norm_backward(const Launch&, const NormRows& n, const NormGradients& g) {
  const DType wide = wide_of(n.dtype);
  std::vector<double> dweight(n.size), dshift(n.size), unit(n.size), above(n.size);
  for (size_t r = 0; r < n.rows; ++r) {
    const double mean = load_or(g.mean, wide, r, 0), scale = load(g.scale, wide, r);
    double sum = 0, product = 0;
    for (size_t i = 0; i < n.size; ++i) {
      const size_t at = r * n.size + i;
      const double weight = load_or(g.weight, n.dtype, i, 1), dy = load(g.dy, n.dtype, at);
      unit[i] = g.x != nullptr ? (load(g.x, n.dtype, at) - mean) * scale
                               : (load(g.y, n.dtype, at) - load_or(g.shift, n.dtype, i, 0)) / weight;
      above[i] = dy * weight;
      dweight[i] += dy * unit[i];
      dshift[i] += dy;
      sum += above[i] / static_cast<double>(n.size);
      product += above[i] * unit[i] / static_cast<double>(n.size);
    }
    for (size_t i = 0; i < n.size; ++i) {
      const size_t at = r * n.size + i;
      store(g.dx, n.dtype, at,
            scale * (above[i] - (n.centered ? sum : 0) - unit[i] * product) + load_or(g.more, n.dtype, at, 0));
    }
  }
  for (size_t i = 0; i < n.size && g.dweight != nullptr; ++i) {
    store(g.dweight, wide, i, dweight[i]);
    store(g.dshift, wide, i, dshift[i]);
  }
}

void activation(const Launch&, const ActivationRows& a, const void* x, const void* bias, void* y) {
  const size_t across = a.gated ? 2 * a.size : a.size;
  for (size_t r = 0; r < a.rows; ++r)
    for (size_t i = 0; i < a.size; ++i) {
      const double gate = load(x, a.dtype, r * across + i) + load_or(bias, a.dtype, i, 0);
      const double value =
          a.gated ? load(x, a.dtype, r * across + a.size + i) + load_or(bias, a.dtype, a.size + i, 0) : 1;
      store(y, a.dtype, r * a.size + i, activated(a.kind, gate) * value);
    }
}

void activation_backward(const Launch&, const ActivationRows& a, const void* dy, const void* x, const void* bias,
                         void* dx) {
  const size_t across = a.gated ? 2 * a.size : a.size;
  for (size_t r = 0; r < a.rows; ++r)
    for (size_t i = 0; i < a.size; ++i) {
      const size_t at = r * across + i;
      const double gate = load(x, a.dtype, at) + load_or(bias, a.dtype, i, 0),
                   upper = load(dy, a.dtype, r * a.size + i);
      if (!a.gated) {
        store(dx, a.dtype, at, upper * activation_slope(a.kind, gate));
        continue;
      }
      const double value = load(x, a.dtype, at + a.size) + load_or(bias, a.dtype, a.size + i, 0);
      store(dx, a.dtype, at, upper * value * activation_slope(a.kind, gate));
      store(dx, a.dtype, at + a.size, upper * activated(a.kind, gate));
    }
}

void dropout(const Launch&, const RowDropout& d, DType dtype, size_t rows, size_t size, const void* x, const void* bias,
             const void* residual, void* y) {
  for (size_t r = 0; r < rows; ++r)
    for (size_t i = 0; i < size; ++i) {
      const size_t at = r * size + i;
      const double kept = row_factor(d, static_cast<uint32_t>(r), static_cast<uint32_t>(i));
      store(y, dtype, at, (load(x, dtype, at) + load_or(bias, dtype, i, 0)) * kept + load_or(residual, dtype, at, 0));
    }
}

void rotary(const Launch&, const RotaryHeads& h, const void* x, void* out) {
  const size_t pairs = h.rotated / 2;
  for (size_t t = 0; t < h.tokens; ++t)
    for (size_t head = 0; head < h.heads; ++head) {
      const size_t row = t * h.token + head * h.head;
      for (size_t f = 2 * pairs; f < h.size; ++f) store(out, h.dtype, row + f, load(x, h.dtype, row + f));
      for (size_t p = 0; p < pairs; ++p) {
        const double angle = static_cast<double>(h.positions[t]) *
                             std::pow(h.base, -2.0 * static_cast<double>(p) / static_cast<double>(h.rotated));
        const size_t a = row + (h.interleaved ? 2 * p : p), b = h.interleaved ? a + 1 : a + pairs;
        const double cosine = std::cos(angle), sine = h.back ? -std::sin(angle) : std::sin(angle);
        const double left = load(x, h.dtype, a), right = load(x, h.dtype, b);
        store(out, h.dtype, a, left * cosine - right * sine);
        store(out, h.dtype, b, right * cosine + left * sine);
      }
    }
}

}  // namespace ds::kernels::ref

// Rotary embeddings on the CPU: the angles of a token are computed once for all of its heads.
#include <cmath>
#include <vector>

#include "kernels/cpu/elements.h"
#include "kernels/cpu/layer_ops.h"
#include "kernels/cpu/split.h"
#include "kernels/ref/layer_ops.h"

namespace ds::kernels::cpu {

namespace {

template <typename T>
void rotate(const RotaryHeads& h, const std::vector<double>& steps, const T* x, T* out, size_t begin, size_t end) {
  const size_t pairs = steps.size();
  std::vector<float> cosines(pairs), sines(pairs);
  for (size_t t = begin; t < end; ++t) {
    for (size_t p = 0; p < pairs; ++p) {
      const double angle = static_cast<double>(h.positions[t]) * steps[p];
      cosines[p] = static_cast<float>(std::cos(angle));
      sines[p] = static_cast<float>(h.back ? -std::sin(angle) : std::sin(angle));
    }
    for (size_t head = 0; head < h.heads; ++head) {
      const size_t row = t * h.token + head * h.head;
      for (size_t f = 2 * pairs; f < h.size && out != x; ++f) out[row + f] = x[row + f];
      for (size_t p = 0; p < pairs; ++p) {
        const size_t a = row + (h.interleaved ? 2 * p : p), b = h.interleaved ? a + 1 : a + pairs;
        const float left = wide(x[a]), right = wide(x[b]);
        put(out[a], left * cosines[p] - right * sines[p]);
        put(out[b], right * cosines[p] + left * sines[p]);
      }
    }
  }
}

}  // namespace

void rotary(const Launch& launch, const RotaryHeads& h, const void* x, void* out) {
  if (h.dtype == DType::kF64) return ref::rotary(launch, h, x, out);
  std::vector<double> steps(h.rotated / 2);
  for (size_t p = 0; p < steps.size(); ++p)
    steps[p] = std::pow(h.base, -2.0 * static_cast<double>(p) / static_cast<double>(h.rotated));
  split_rows(launch, h.tokens, h.heads * h.size, [&](size_t begin, size_t end) {
    with_element(h.dtype, [&](auto type) {
      using T = decltype(type);
      rotate(h, steps, static_cast<const T*>(x), static_cast<T*>(out), begin, end);
    });
  });
}

}  // namespace ds::kernels::cpu

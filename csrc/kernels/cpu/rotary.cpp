// Rotary embeddings on the CPU: the angles of a token are computed once for all of its heads.
#include <cmath>
#include <vector>

#include "base/half.h"
#include "kernels/cpu/layer_ops.h"
#include "kernels/cpu/split.h"
#include "kernels/ref/layer_ops.h"

namespace ds::kernels::cpu {

namespace {

float load(float x) { return x; }
float load(Fp16 x) { return to_float(x); }
float load(Bf16 x) { return to_float(x); }
void store(float& to, float x) { to = x; }
void store(Fp16& to, float x) { to = to_fp16(x); }
void store(Bf16& to, float x) { to = to_bf16(x); }

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
        const float left = load(x[a]), right = load(x[b]);
        store(out[a], left * cosines[p] - right * sines[p]);
        store(out[b], right * cosines[p] + left * sines[p]);
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
  const auto as = [&](auto type, size_t begin, size_t end) {
    using T = decltype(type);
    rotate(h, steps, static_cast<const T*>(x), static_cast<T*>(out), begin, end);
  };
  const auto body = [&](size_t begin, size_t end) {
    if (h.dtype == DType::kF32) return as(float{}, begin, end);
    h.dtype == DType::kF16 ? as(Fp16{}, begin, end) : as(Bf16{}, begin, end);
  };
  const size_t of_token = h.heads * h.size;
  if (h.tokens == 0) return;
  if (launch.pool == nullptr || h.tokens * of_token <= kInline) return body(0, h.tokens);
  launch.pool->parallel_for(h.tokens, std::max<size_t>(1, kGrain / std::max<size_t>(1, of_token)), body);
}

}  // namespace ds::kernels::cpu

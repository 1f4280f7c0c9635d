#include "kernels/ref/routes.h"

#include <algorithm>
#include <cmath>

#include "kernels/ref/element.h"

namespace ds::kernels::ref {

void topk_gate(const Launch&, const float* logits, const float* select, size_t tokens, size_t experts, size_t k,
               float* probs, int32_t* index) {
  for (size_t t = 0; t < tokens; ++t) {
    const float *row = logits + t * experts, *by = (select != nullptr ? select : logits) + t * experts;
    float *p = probs + t * experts, largest = -INFINITY, sum = 0;
    bool nan = false;
    for (size_t e = 0; e < experts; ++e) {
      nan = nan || std::isnan(row[e]);
      largest = std::max(largest, row[e]);
    }
    for (size_t e = 0; e < experts; ++e) sum += p[e] = std::exp(row[e] - largest);
    for (size_t e = 0; e < experts; ++e) p[e] /= sum;
    for (size_t j = 0; j < k; ++j) {
      int32_t best = nan ? -2 : -1;
      for (size_t e = 0; e < experts && !nan; ++e) {
        const auto taken = std::find(index + t * k, index + t * k + j, static_cast<int32_t>(e));
        if (taken == index + t * k + j && (best < 0 || by[e] > by[best])) best = static_cast<int32_t>(e);
      }
      index[t * k + j] = best;
    }
  }
}

void permute_rows(const Launch&, void* out, const void* src, DType dtype, size_t width, size_t rows,
                  const int32_t* index, const float* weight, int64_t divisor) {
  for (size_t r = 0; r < rows; ++r) {
    for (size_t i = 0; i < width; ++i) {
      double x = 0;
      if (index[r] >= 0) {
        x = load(src, dtype, index[r] / divisor * width + i);
        if (weight != nullptr) x *= weight[index[r]];
      }
      store(out, dtype, r * width + i, x);
    }
  }
}

void combine_rows(const Launch&, void* out, const void* src, DType dtype, size_t width, size_t tokens, size_t k,
                  const int32_t* slot, const float* weight) {
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t i = 0; i < width; ++i) {
      double sum = 0;
      for (size_t a = t * k; a < (t + 1) * k; ++a) {
        if (slot[a] < 0) continue;
        const double x = load(src, dtype, slot[a] * width + i) * (weight != nullptr ? weight[a] : 1);
        sum = dtype == DType::kF64 ? sum + x : static_cast<float>(sum) + static_cast<float>(x);
        if (dtype != DType::kF64) sum = static_cast<float>(sum);
      }
      store(out, dtype, t * width + i, sum);
    }
  }
}

void dot_rows(const Launch&, float* out, const void* src, const void* grad, DType dtype, size_t width, size_t tokens,
              size_t k, const int32_t* slot) {
  for (size_t a = 0; a < tokens * k; ++a) {
    double sum = 0;
    for (size_t i = 0; i < width && slot[a] >= 0; ++i)
      sum += load(src, dtype, slot[a] * width + i) * load(grad, dtype, a / k * width + i);
    out[a] = static_cast<float>(sum);
  }
}

void grouped_gemm(const Launch&, const GemmGroup* groups, size_t count, GemmForm form, DType dtype) {
  for (const GemmGroup* g = groups; g != groups + count; ++g) {
    for (int64_t i = 0; i < g->m; ++i) {
      for (int64_t j = 0; j < g->n; ++j) {
        double sum = g->bias != nullptr ? load(g->bias, dtype, j) : 0;
        for (int64_t p = 0; p < g->k; ++p) {
          const double a = load(g->a, dtype, form.a_turned ? p * g->m + i : i * g->k + p);
          sum += a * load(g->b, dtype, form.b_turned ? j * g->k + p : p * g->n + j);
        }
        store(g->c, dtype, i * g->n + j, sum);
      }
    }
  }
}

}  // namespace ds::kernels::ref

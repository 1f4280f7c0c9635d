// The softmax and the choice of the k largest of a gate, token by token.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/routes.h"
#include "kernels/cpu/split.h"

namespace ds::kernels::cpu {

namespace {

void gate_token(const float* row, const float* by, size_t experts, size_t k, float* p, int32_t* best) {
  float largest = -INFINITY, sum = 0;
  bool nan = false;
  for (size_t e = 0; e < experts; ++e) {
    nan = nan || row[e] != row[e];
    largest = std::max(largest, row[e]);
  }
  for (size_t e = 0; e < experts; ++e) sum += p[e] = std::exp(row[e] - largest);
  for (size_t e = 0; e < experts; ++e) p[e] /= sum;
  size_t found = 0;  // best[0 .. found) are sorted, the largest first
  for (size_t e = 0; e < experts && !nan; ++e) {
    if (found == k && !(by[e] > by[best[k - 1]])) continue;
    size_t at = found < k ? found++ : k - 1;
    for (; at > 0 && by[e] > by[best[at - 1]]; --at) best[at] = best[at - 1];
    best[at] = static_cast<int32_t>(e);
  }
  if (nan) std::fill(best, best + k, -2);
}

}  // namespace

void topk_gate(const Launch& launch, const float* logits, const float* select, size_t tokens, size_t experts, size_t k,
               float* probs, int32_t* index) {
  const auto body = [=](size_t begin, size_t end) {
    for (size_t t = begin; t < end; ++t)
      gate_token(logits + t * experts, (select != nullptr ? select : logits) + t * experts, experts, k,
                 probs + t * experts, index + t * k);
  };
  if (launch.pool == nullptr || tokens * experts * 8 <= kInline)
    return body(0, tokens);  // an exp is as much as 8 moves
  launch.pool->parallel_for(tokens, std::max<size_t>(1, kGrain / 8 / experts), body);
}

}  // namespace ds::kernels::cpu

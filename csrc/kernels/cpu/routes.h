// The CPU's entries of the table of routes, one per instruction set in the order of ds::Isa.
#pragma once
#include "base/cpu_features.h"
#include "kernels/routes.h"

namespace ds::kernels::cpu {

extern const decltype(RouteKernels::permute_rows) kPermuteRows[kIsaCount];
extern const decltype(RouteKernels::combine_rows) kCombineRows[kIsaCount];
extern const decltype(RouteKernels::dot_rows) kDotRows[kIsaCount];
extern const decltype(RouteKernels::grouped_gemm) kGroupedGemm[kIsaCount];

// Not vectorised: a few numbers of each token.
void topk_gate(const Launch&, const float* logits, const float* select, size_t tokens, size_t experts, size_t k,
               float* probs, int32_t* index);

}  // namespace ds::kernels::cpu

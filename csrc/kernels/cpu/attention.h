// The CPU's entries of the table of attention, one per instruction set in the order of ds::Isa.
#pragma once
#include "base/cpu_features.h"
#include "kernels/attention.h"

namespace ds::kernels::cpu {

extern const decltype(AttentionKernels::forward) kAttentionForward[kIsaCount];
extern const decltype(AttentionKernels::merge) kAttentionMerge[kIsaCount];
extern const decltype(AttentionKernels::backward) kAttentionBackward[kIsaCount];
extern const decltype(AttentionKernels::bias_backward) kAttentionBiasBackward[kIsaCount];

// Fewer multiplications than this are done before a thread has been woken up.
constexpr int64_t kAttentionInline = 1 << 20;

inline int64_t multiplications(const AttentionShape& s) {
  return s.batch * s.heads * s.queries * s.keys * (s.size + s.value_size);
}

}  // namespace ds::kernels::cpu

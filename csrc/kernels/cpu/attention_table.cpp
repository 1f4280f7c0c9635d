// The CPU's tables of kernels/attention.h, one per instruction set: the choice among them is that of cpu/table.cpp.
#include "kernels/cpu/attention.h"
#include "kernels/cpu/entries.h"
#include "kernels/ref/attention.h"

namespace ds::kernels::cpu {
namespace {

IsaTables<AttentionKernels> attention_tables() {
  constexpr size_t kSize = sizeof(AttentionKernels);
  IsaTables<AttentionKernels> all = {{kAttentionAbi, kSize, &ref::attention_forward, &ref::attention_merge,
                                      &ref::attention_backward, &ref::attention_bias_backward},
                                     {}};
  for (int i = 0; i < kIsaCount; ++i)
    all.by_isa[i] = {kAttentionAbi,         kSize,
                     kAttentionForward[i],  kAttentionMerge[i],
                     kAttentionBackward[i], kAttentionBiasBackward[i]};
  return all;
}

}  // namespace
}  // namespace ds::kernels::cpu

const ds::kernels::AttentionKernels* ds_cpu_attention_kernels_isa(uint32_t abi, const char* isa) {
  static const auto all = ds::kernels::cpu::attention_tables();
  return abi == ds::kernels::kAttentionAbi ? all.find(isa) : nullptr;
}

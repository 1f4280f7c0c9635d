// The CPU's tables of kernels/attention.h, one per instruction set: the choice among them is that of cpu/table.cpp.
#include <cstring>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/entries.h"
#include "kernels/ref/attention.h"

namespace ds::kernels::cpu {
namespace {

struct AttentionTables {
  AttentionKernels ref = {kAttentionAbi, sizeof(AttentionKernels), &ref::attention_forward, &ref::attention_merge,
                          &ref::attention_backward};
  AttentionKernels by_isa[kIsaCount];

  AttentionTables() {
    for (int i = 0; i < kIsaCount; ++i)
      by_isa[i] = {kAttentionAbi, sizeof(AttentionKernels), kAttentionForward[i], kAttentionMerge[i],
                   kAttentionBackward[i]};
  }
};

const AttentionTables& attention_tables() {
  static const AttentionTables all;
  return all;
}

}  // namespace
}  // namespace ds::kernels::cpu

using namespace ds::kernels;

const AttentionKernels* ds_cpu_attention_kernels_isa(uint32_t abi, const char* isa) {
  if (abi != kAttentionAbi) return nullptr;
  if (std::strcmp(isa, "ref") == 0) return &cpu::attention_tables().ref;
  for (int i = 0; i < ds::kIsaCount; ++i) {
    const auto one = static_cast<ds::Isa>(i);
    if (std::strcmp(isa, ds::isa_name(one)) == 0 && cpu::built(one) && ds::cpu_has(one))
      return &cpu::attention_tables().by_isa[i];
  }
  return nullptr;
}

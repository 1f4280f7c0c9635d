// The CPU's tables of kernels/layer_ops.h, one per instruction set: the choice among them is that of cpu/table.cpp.
#include "kernels/cpu/entries.h"
#include "kernels/cpu/layer_ops.h"
#include "kernels/ref/layer_ops.h"

namespace ds::kernels::cpu {
namespace {

IsaTables<LayerKernels> layer_tables() {
  constexpr size_t kSize = sizeof(LayerKernels);
  IsaTables<LayerKernels> all = {{kLayerAbi, kSize, &ref::norm, &ref::norm_backward, &ref::activation,
                                  &ref::activation_backward, &ref::dropout, &ref::rotary},
                                 {}};
  for (int i = 0; i < kIsaCount; ++i)
    all.by_isa[i] = {kLayerAbi,   kSize,  kNorm[i], kNormBackward[i], kActivation[i], kActivationBackward[i],
                     kDropout[i], &rotary};
  return all;
}

}  // namespace
}  // namespace ds::kernels::cpu

const ds::kernels::LayerKernels* ds_cpu_layer_kernels_isa(uint32_t abi, const char* isa) {
  static const auto all = ds::kernels::cpu::layer_tables();
  return abi == ds::kernels::kLayerAbi ? all.find(isa) : nullptr;
}

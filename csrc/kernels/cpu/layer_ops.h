// The CPU's entries of the table of layers, one per instruction set in the order of ds::Isa.
#pragma once
#include "base/cpu_features.h"
#include "kernels/layer_ops.h"

namespace ds::kernels::cpu {

extern const decltype(LayerKernels::norm) kNorm[kIsaCount];
extern const decltype(LayerKernels::norm_backward) kNormBackward[kIsaCount];
extern const decltype(LayerKernels::activation) kActivation[kIsaCount];
extern const decltype(LayerKernels::activation_backward) kActivationBackward[kIsaCount];
extern const decltype(LayerKernels::dropout) kDropout[kIsaCount];

// Not vectorised: the cosines of a token serve all of its heads.
void rotary(const Launch&, const RotaryHeads&, const void* x, void* out);

}  // namespace ds::kernels::cpu

// The plain loops of kernels/layer_ops.h.
#pragma once
#include "kernels/layer_ops.h"

namespace ds::kernels::ref {

void norm(const Launch&, const NormRows&, const NormInputs&, const NormOutputs&);
void norm_backward(const Launch&, const NormRows&, const NormGradients&);
void activation(const Launch&, const ActivationRows&, const void* x, const void* bias, void* y);
void activation_backward(const Launch&, const ActivationRows&, const void* dy, const void* x, const void* bias,
                         void* dx);
void dropout(const Launch&, const RowDropout&, DType dtype, size_t rows, size_t size, const void* x, const void* bias,
             const void* residual, void* y);
void rotary(const Launch&, const RotaryHeads&, const void* x, void* out);

}  // namespace ds::kernels::ref

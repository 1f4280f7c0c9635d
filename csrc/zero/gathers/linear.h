// A linear layer whose graph keeps the weight itself, and no view of it.
#pragma once
#include <ATen/core/Tensor.h>

namespace ds::zero {

// torch.nn.functional.linear(input, weight, bias), with derivatives of any order. The graph saves `weight`, whose
// values may go and come back between forward and backward; torch's own saves a transposed view, which keeps their
// memory. The backward runs without autocast. The autograd node is named LinearFunctionForZeroStage3.
at::Tensor linear_keeping_weight(const at::Tensor& input, const at::Tensor& weight,
                                 const c10::optional<at::Tensor>& bias);

}  // namespace ds::zero

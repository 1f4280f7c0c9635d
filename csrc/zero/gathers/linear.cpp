#include "zero/gathers/linear.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

namespace ds::zero {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// All leading dimensions as one; -1 would not do for a tensor without elements.
at::Tensor rows_of(const at::Tensor& tensor) { return tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor.flatten(0, -2); }

struct LinearFunctionForZeroStage3 : torch::autograd::Function<LinearFunctionForZeroStage3> {
  static constexpr bool is_traceable = true;  // by torch's compiled autograd: the backward has operators only

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const c10::optional<at::Tensor>& bias) {
    ctx->save_for_backward({input, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    return at::linear(input, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const c10::impl::ExcludeDispatchKeyGuard no_cast{c10::autocast_dispatch_keyset};
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &input = saved[0], &grad = grads[0];
    // create_graph: the weight is not gathered for that graph, so it keeps the values.
    const at::Tensor weight = at::GradMode::is_enabled() ? saved[1].view_as(saved[1]) : saved[1];
    const at::Tensor rows = rows_of(grad);
    variable_list made(3);
    if (ctx->needs_input_grad(0)) made[0] = at::matmul(grad, weight);
    if (ctx->needs_input_grad(1)) made[1] = at::matmul(rows.t(), rows_of(input));
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) made[2] = rows.sum(0);
    return made;
  }
};

}  // namespace

at::Tensor linear_keeping_weight(const at::Tensor& input, const at::Tensor& weight,
                                 const c10::optional<at::Tensor>& bias) {
  return LinearFunctionForZeroStage3::apply(input, weight, bias);
}

}  // namespace ds::zero

"""A linear layer whose graph keeps the weight itself.

torch's own saves a transposed view of it, and a view keeps its memory: at ZeRO stage 3 a gathered weight would stay in
memory until backward. The function here saves the parameter, whose values may go and come back. Layers of users get
torch's own products in it, as at the other stages, so that all stages train alike. Layers of this library call
``exact_linear``.
"""

import functools

import torch
from torch.overrides import handle_torch_function

from deepspeed import _native
from deepspeed._compat import autocast_is_on, autocast_now, is_compiling, takes_context_setup, transforms_are_active
from deepspeed.ops.half_products import add_in_fp32, needs_fp32
from deepspeed.zero.parameters.sharded_parameter import ReleasedParameter, is_sharded

_torch_linear = torch.nn.functional.linear  # before zero3_linear_wrap may replace it


def noop_decorator(func):
    """Returns ``func`` unchanged; a published name that stands for an optional decorator."""
    return func


def _set_up(ctx, inputs, output):
    input, weight, bias = (*inputs, None)[:3]
    ctx.has_bias = bias is not None
    ctx.autocast = autocast_now([input.device.type])
    ctx.save_for_backward(input, weight)


def _rows(tensor):
    """All leading dimensions as one; -1 would not do for a tensor without elements."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def _gradients(ctx, grad_output, product):
    """Returns the gradients of input, weight and bias that are asked for. ``product``: ``torch.matmul``, or a
    replacement."""
    input, weight = ctx.saved_tensors
    grad_input = grad_weight = grad_bias = None
    if torch.is_grad_enabled():  # create_graph: the weight is not gathered for that graph, so it keeps the values
        weight = weight.view_as(weight)
    with ctx.autocast():
        rows = _rows(grad_output)
        if ctx.needs_input_grad[0]:
            grad_input = product(grad_output, weight)
        if ctx.needs_input_grad[1]:
            grad_weight = product(rows.t(), _rows(input))
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
    return grad_input, grad_weight, grad_bias


@takes_context_setup
class LinearFunctionForZeroStage3(torch.autograd.Function):
    """``apply(input, weight, bias=None)`` equals ``torch.nn.functional.linear``. Layers run its equal in C++
    (csrc/zero/gathers/linear.h), except where torch transforms or compiles functions.

    input: (*, in_features), any number of leading dimensions; weight: (out_features, in_features); bias:
    (out_features) or None; result: (*, out_features). Derivatives of any order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(input, weight, bias=None):
        return _torch_linear(input, weight, bias)

    setup_context = staticmethod(_set_up)

    @staticmethod
    def backward(ctx, grad_output):
        return _gradients(ctx, grad_output, torch.matmul)


@takes_context_setup
class _ExactLinearFunction(LinearFunctionForZeroStage3):
    """The same, whose products of 16-bit tensors on the CPU add in fp32."""

    @staticmethod
    def forward(input, weight, bias=None):
        return add_in_fp32(_torch_linear, input, weight, bias)

    @staticmethod
    def backward(ctx, grad_output):
        return _gradients(ctx, grad_output, functools.partial(add_in_fp32, torch.matmul))


def zero3_linear_wrap(input, weight, bias=None):
    """``torch.nn.functional.linear`` that keeps no view of ``weight``.

    Under autocast it is torch's own: the graph keeps the cast copy of the weight then, and no view of the weight.
    """
    return _without_view(zero3_linear_wrap, _keep_weight, input, weight, bias)


def _keep_weight(input, weight, bias):
    if is_compiling() or transforms_are_active():
        return LinearFunctionForZeroStage3.apply(input, weight, bias)
    return _native._C.linear_keeping_weight(input, weight, bias)


def exact_linear(input, weight, bias=None):
    """``torch.nn.functional.linear`` for layers of this library: on the CPU it and its gradients add in fp32."""
    if not needs_fp32(input, weight, bias):
        return torch.nn.functional.linear(input, weight, bias)
    return _without_view(exact_linear, _ExactLinearFunction.apply, input, weight, bias)


def _without_view(caller, function, input, weight, bias):
    if autocast_is_on(input.device.type):
        return _torch_linear(input, weight, bias)
    if isinstance(weight, ReleasedParameter) or isinstance(bias, ReleasedParameter):
        # The parameters may belong to a module that is not called itself. They are fetched first, because the graph
        # records shapes as they are at apply.
        return handle_torch_function(caller, (weight, bias), input, weight, bias)
    return function(input, weight, bias)


class LinearModuleForZeroStage3(torch.nn.Linear):
    """``torch.nn.Linear`` on ``zero3_linear_wrap``; parameters, their initial values and names are the same."""

    def __init__(self, in_features, out_features, bias=True):
        super().__init__(in_features, out_features, bias)

    def forward(self, input):
        return zero3_linear_wrap(input, self.weight, self.bias)


def _linear(input, weight, bias=None):
    chosen = is_sharded(weight) and weight.ds_access.efficient_linear and not weight.ds_handle.persistent
    return zero3_linear_wrap(input, weight, bias) if chosen else _torch_linear(input, weight, bias)


def scope():
    """While a model with hooks of this scope runs, ``torch.nn.functional.linear`` keeps no view of sharded weights
    whose ``ds_access`` says ``efficient_linear``. At any other time it is torch's own, which TorchScript knows. A
    weight that stays gathered may have a view."""
    return _native._C.LinearScope(vars(torch.nn.functional), _linear)

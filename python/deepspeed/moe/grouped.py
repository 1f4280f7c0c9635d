"""Computes all experts of a rank together: their linear layers are products of many groups, without padding."""

import operator

import torch
from torch import fx, nn
from torch.nn import functional as F

from deepspeed import _native
from deepspeed.ops.token_rows import ops

# Modules and functions that work on each element by itself: rows of several experts can be computed together.
_MODULES = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Mish, nn.Hardswish,
    nn.Identity, nn.Dropout,
)  # fmt: skip
_FUNCTIONS = {
    operator.add, operator.mul, operator.sub, torch.add, torch.mul, torch.relu, torch.tanh, torch.sigmoid,
    F.relu, F.gelu, F.silu, F.tanh, F.sigmoid, F.leaky_relu, F.elu,
}  # fmt: skip
_METHODS = {"relu", "tanh", "sigmoid", "mul", "add", "sub"}


def _tell_of_product(out, x, weights):
    if x.device.type in ("cpu", "meta"):  # elsewhere the kernel consists of torch's products
        _native.tell_modes("grouped_linear", out, x, weights)


class _GroupedLinear(torch.autograd.Function):
    """``apply(x, rows, stacked, *params)``: weights and then biases of all groups, or the weights in one tensor."""

    @staticmethod
    def forward(ctx, x, rows, stacked, *params):
        weights = params[0].detach().unbind(0) if stacked else params[: len(rows)]
        ctx.save_for_backward(x, *(params if stacked else weights))
        ctx.rows, ctx.stacked = rows, stacked
        out = ops().grouped_linear(x, rows, list(weights), [] if stacked else list(params[len(rows) :]))
        _tell_of_product(out, x, weights)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        count, (wants_x, _, _, *wants) = len(weights), ctx.needs_input_grad
        wants_weights, wants_biases = any(wants[:count]), any(wants[count:])
        each = list(weights[0].detach().unbind(0)) if ctx.stacked else weights
        to_x, to_weights, to_biases = ops().grouped_linear_grads(
            x, grad, ctx.rows, each, wants_x, wants_weights, wants_biases, stacked=ctx.stacked
        )
        for _ in range(bool(wants_x) + wants_weights):
            _tell_of_product(grad, x, each)
        nothing = [None] * count
        biases = (to_biases if wants_biases else nothing)[: len(wants) - count]
        return to_x, None, None, *(to_weights if wants_weights else nothing), *biases


def stacked_product(x, rows, weight):
    """The next ``rows[g]`` rows of ``x`` times ``weight[g]`` [out, in], turned, for all g; ``weight`` is one tensor."""
    return _GroupedLinear.apply(x, rows, True, weight)


def grouped_product(x, rows, weights, biases=()):
    """The next ``rows[g]`` rows of ``x`` times ``weights[g]`` [out, in], turned, plus ``biases[g]``."""
    return _GroupedLinear.apply(x, rows, False, *weights, *biases)


def grouped_linear(x, rows, layers):
    """The next ``rows[g]`` rows of ``x`` through ``layers[g]``; the layers are linear and of one shape."""
    biases = [layer.bias for layer in layers] if layers[0].bias is not None else ()
    return grouped_product(x, rows, [layer.weight for layer in layers], biases)


class _Result(int):
    """The number of a step; it stands for the result of that step."""


def steps_of(expert):
    """The operations of ``expert`` as ``(kind, target, args, kwargs)``, if all are linear layers or work on each
    element by itself; else None."""
    try:
        graph = fx.Tracer().trace(expert)
    except Exception:  # tracing calls the module with proxies: a module that fails then is not supported
        return None
    modules, numbers, steps = dict(expert.named_modules()), {}, []
    for node in graph.nodes:
        if not _fits(node, modules):
            return None
        args, kwargs = (fx.node.map_arg(given, lambda n: _Result(numbers[n])) for given in (node.args, node.kwargs))
        numbers[node] = len(steps)
        steps.append((node.op, node.target, args, kwargs))
    return steps if sum(kind == "placeholder" for kind, *_ in steps) == 1 else None


def _fits(node, modules):
    if node.op == "placeholder":
        return not node.args
    if node.op == "output":
        return isinstance(node.args[0], fx.Node)
    if node.op == "call_module":
        kind = type(modules[node.target])
        return kind is nn.Linear or kind in _MODULES
    return (
        node.op == "call_function" and node.target in _FUNCTIONS or node.op == "call_method" and node.target in _METHODS
    )


def run_grouped(experts, steps, x, rows):
    """The next ``rows[e]`` rows of ``x`` through ``experts[e]``, for all e. ``steps``: of ``steps_of`` one of them."""
    results = []

    def known(a):
        return results[a] if isinstance(a, _Result) else a

    for kind, target, args, kwargs in steps:
        args, kwargs = (fx.node.map_aggregate(given, known) for given in (args, kwargs))
        if kind == "placeholder":
            results.append(x)
        elif kind == "output":
            return args[0]
        elif kind == "call_module":
            layers = [expert.get_submodule(target) for expert in experts]
            linear = isinstance(layers[0], nn.Linear)
            results.append(grouped_linear(args[0], rows, layers) if linear else layers[0](*args, **kwargs))
        elif kind == "call_function":
            results.append(target(*args, **kwargs))
        else:
            results.append(getattr(args[0], target)(*args[1:], **kwargs))
    raise AssertionError("a traced module ends with its output")

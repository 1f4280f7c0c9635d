"""Operations between the products of transformer layers, with gradients: norms, activations, dropout with a bias and a
residual, rotary embeddings. The kernels are those of csrc/kernels/layer_ops.h; on a device that has none, and under a
compiler, torch's operations compute the same formulas.

Tensors are rows ``[..., size]`` of one dtype (fp32, bf16, fp16 or fp64); arithmetic is in fp32, or fp64.
"""

import functools

import torch

from deepspeed._compat import is_compiling
from deepspeed._native import _C, tell_modes
from deepspeed.ops.attention.blocks import philox
from deepspeed.ops.half_products import add_in_fp32

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "silu")


@functools.lru_cache(maxsize=4)
def _ops_of(threads):
    return _C.LayerOps(threads)


def ops():
    """The kernels, on as many threads as torch's."""
    return _ops_of(torch.get_num_threads())


@functools.lru_cache(maxsize=None)
def _built_for(device_type):
    return device_type == "meta" or _C.LayerOps.built_for(device_type)


def by_kernel(x):
    """Whether kernels compute operations on ``x``."""
    return x.dtype in DTYPES and not is_compiling() and _built_for(x.device.type)


def _sum_of_rows(grad, like):
    """The gradient of what was added to every row."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=wide).to(like.dtype)


def _weight_grads(ctx, dweight, dshift, weight, shift, first):
    """In the dtypes of the weights, None for those without a gradient."""
    wanted = zip((dweight, dshift), (weight, shift), ctx.needs_input_grad[first:])
    return [grad.to(like.dtype) if needs else None for grad, like, needs in wanted]


class Dropout:
    """The choice of dropped elements of rows: ``probability`` of them, by ``seed`` and the number of each element
    (row_factor in csrc/kernels/layer_ops.h). The others are divided by 1 - ``probability``."""

    def __init__(self, probability, seed):
        if not 0 <= probability < 1:
            raise ValueError(f"dropout is {probability}: it is 0 or more, and less than 1")
        self.probability, self.seed = probability, seed

    @classmethod
    def drawn(cls, probability):
        """With a seed from torch's generator on the CPU: a forward that is repeated with the same state of it drops the
        same elements. None if nothing is dropped."""
        return cls(probability, int(torch.randint(1 << 62, ()))) if probability else None

    def factors(self, x):
        """By what each element of ``x`` is multiplied, in fp32 or fp64."""
        size = x.shape[-1]
        rows = torch.arange(x.numel() // max(size, 1), device=x.device).view(-1, 1)
        words = torch.arange((size + 3) // 4, device=x.device).view(1, -1)
        none = torch.zeros_like(words)
        bits = torch.stack(torch.broadcast_tensors(*philox((words, rows, none, none), self.seed)), -1)
        kept = bits.flatten(-2)[:, :size] >= int(self.probability * (1 << 32))
        wide = torch.promote_types(x.dtype, torch.float32)
        return (kept.to(wide) * (1 / (1 - self.probability))).view(x.shape)


def _dropped(x, bias, residual, dropout):
    """dropout(x + bias) + residual, by the kernel."""
    probability, seed = (0.0, 0) if dropout is None else (dropout.probability, dropout.seed)
    out = ops().dropout(x, bias, residual, probability, seed, 0)
    tell_modes("bias_dropout_residual", out, x, bias, residual)
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, shift, eps, centered, keep_result):
        y, _, mean, scale = ops().norm(x, None, None, weight, shift, eps, centered)
        tell_modes("norm", y, x)
        ctx.keep_result = keep_result
        ctx.save_for_backward(y if keep_result else x, weight, shift, mean, scale)
        return y

    @staticmethod
    def backward(ctx, dy):
        kept, weight, shift, mean, scale = ctx.saved_tensors
        x, y = (None, kept) if ctx.keep_result else (kept, None)
        wanted = any(ctx.needs_input_grad[1:3])
        dx, *found = ops().norm_backward(dy, x, y, weight, shift, mean, scale, None, wanted)
        tell_modes("norm_backward", dx, dy)
        return (dx, *_weight_grads(ctx, *found, weight, shift, 1), None, None, None)


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, residual, dropout):
        ctx.dropout, ctx.biased = dropout, bias is not None
        ctx.bias_like = None if bias is None else bias.new_empty(0)
        return _dropped(x, bias, residual, dropout)

    @staticmethod
    def backward(ctx, grad):
        dx = grad if ctx.dropout is None else _dropped(grad, None, None, ctx.dropout)
        dbias = _sum_of_rows(dx, ctx.bias_like) if ctx.needs_input_grad[1] else None
        return dx, dbias, grad if ctx.needs_input_grad[2] else None, None


class _DropoutAddNorm(torch.autograd.Function):
    """The sum, and its norm."""

    @staticmethod
    def forward(ctx, x, bias, residual, weight, shift, dropout, eps, centered, keep_result):
        ctx.set_materialize_grads(False)
        if dropout is None:
            y, total, mean, scale = ops().norm(x, bias, residual, weight, shift, eps, centered)
        else:
            total = _dropped(x, bias, residual, dropout)
            y, _, mean, scale = ops().norm(total, None, None, weight, shift, eps, centered)
        tell_modes("norm", y, x)
        ctx.dropout, ctx.keep_result = dropout, keep_result
        ctx.bias_like = None if bias is None else bias.new_empty(0)
        ctx.save_for_backward(y if keep_result else total, weight, shift, mean, scale)
        return total, y

    @staticmethod
    def backward(ctx, dtotal, dy):
        kept, weight, shift, mean, scale = ctx.saved_tensors
        weight_grads = [None, None]
        if dy is not None:
            x, y = (None, kept) if ctx.keep_result else (kept, None)
            wanted = any(ctx.needs_input_grad[3:5])
            dtotal, *found = ops().norm_backward(dy, x, y, weight, shift, mean, scale, dtotal, wanted)
            tell_modes("norm_backward", dtotal, dy)
            weight_grads = _weight_grads(ctx, *found, weight, shift, 3)
        dx = dtotal if ctx.dropout is None or dtotal is None else _dropped(dtotal, None, None, ctx.dropout)
        dbias = _sum_of_rows(dx, ctx.bias_like) if ctx.needs_input_grad[1] and dx is not None else None
        return (dx, dbias, dtotal if ctx.needs_input_grad[2] else None, *weight_grads, None, None, None, None)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, kind, gated):
        y = ops().activation(x, bias, kind, gated)
        tell_modes("activation", y, x)
        ctx.kind, ctx.gated = kind, gated
        ctx.save_for_backward(x, bias)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, bias = ctx.saved_tensors
        dx = ops().activation_backward(grad, x, bias, ctx.kind, ctx.gated)
        tell_modes("activation_backward", dx, grad, x)
        return dx, _sum_of_rows(dx, bias) if ctx.needs_input_grad[1] else None, None, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, how):
        ctx.how = how
        ctx.save_for_backward(positions)
        out = ops().rotary(x, positions, *how, False)
        tell_modes("rotary", out, x)
        return out

    @staticmethod
    def backward(ctx, grad):
        (positions,) = ctx.saved_tensors
        dx = ops().rotary(grad, positions, *ctx.how, True)
        tell_modes("rotary", dx, grad)
        return dx, None, None


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *inputs):
        ctx.call = call
        ctx.save_for_backward(*inputs)
        return call(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [
            one if one is None else one.detach().requires_grad_(needs)
            for one, needs in zip(ctx.saved_tensors, ctx.needs_input_grad[1:])
        ]
        with torch.enable_grad():
            result = ctx.call(*inputs)
        wanted = [one for one in inputs if one is not None and one.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, grad))
        return (None, *(next(found) if one is not None and one.requires_grad else None for one in inputs))


def again(call, *inputs):
    """``call(*inputs)``, a tensor, of which backward keeps nothing but ``inputs`` (tensors or None): it calls again.
    Whatever is random in ``call`` has its seed from outside."""
    return _Again.apply(call, *inputs)


# ---- formulas in torch's operations ----------------------------------------------------------------------------------
def _wide(*tensors):
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return [None if one is None else one.to(dtype) for one in tensors]


def _norm_formula(x, weight, shift, eps, centered):
    wide, weight, shift = _wide(x, weight, shift)
    mean = wide.mean(-1, keepdim=True) if centered else 0
    unit = (wide - mean) * (wide - mean).square().mean(-1, keepdim=True).add(eps).rsqrt()
    unit = unit if weight is None else unit * weight
    return (unit if shift is None else unit + shift).to(x.dtype)


def _dropout_formula(x, bias, residual, dropout):
    out, bias, residual = _wide(x, bias, residual)
    out = out if bias is None else out + bias
    out = out if dropout is None else out * dropout.factors(x)
    return (out if residual is None else out + residual).to(x.dtype)


def _activation_formula(x, bias, kind, gated):
    wide, bias = _wide(x, bias)
    wide = wide if bias is None else wide + bias
    gate, value = wide.chunk(2, -1) if gated else (wide, None)
    if kind in ("gelu", "gelu_tanh"):
        out = torch.nn.functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")
    else:
        out = torch.relu(gate) if kind == "relu" else torch.nn.functional.silu(gate)
    return (out if value is None else out * value).to(x.dtype)


def _rotary_formula(x, positions, rotated, base, interleaved):
    (wide,) = _wide(x)
    powers = torch.arange(0, rotated, 2, dtype=torch.float64, device=x.device) / max(rotated, 1)
    angles = positions.reshape(*x.shape[:-2], 1, 1).double() * base**-powers
    cosine, sine = angles.cos().to(wide.dtype), angles.sin().to(wide.dtype)
    turned, rest = wide[..., :rotated], wide[..., rotated:]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, -1)
    pair = (first * cosine - second * sine, second * cosine + first * sine)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned, rest), -1).to(x.dtype)


# ---- what layers call ------------------------------------------------------------------------------------------------
def _check_size(x, **vectors):
    for name, one in vectors.items():
        if one is not None and tuple(one.shape) != tuple(x.shape[-1:]):
            raise ValueError(
                f"{name} has the shape {tuple(one.shape)}: for x of {tuple(x.shape)} it is ({x.shape[-1]},)"
            )


def norm(x, weight=None, shift=None, eps=1e-5, centered=True, keep_result=False):
    """LayerNorm of the last dimension, or RMSNorm with ``centered=False``.

    ``keep_result``: backward computes from the result what was normalized, so that ``x`` need not be kept; no weight
    may be 0. Sources: Ba et al. 2016, "Layer Normalization"; Zhang and Sennrich 2019, "Root Mean Square Layer
    Normalization".
    """
    _check_size(x, weight=weight, shift=shift)
    if not by_kernel(x):
        return _norm_formula(x, weight, shift, eps, centered)
    return _Norm.apply(x, weight, shift, eps, centered, keep_result)


def dropout_add(x, bias=None, residual=None, dropout=None):
    """``dropout(x + bias) + residual``. ``dropout``: a ``Dropout``. No mask is kept."""
    _check_size(x, bias=bias)
    if not by_kernel(x):
        return _dropout_formula(x, bias, residual, dropout)
    return _DropoutAdd.apply(x, bias, residual, dropout)


def dropout_add_norm(x, bias, residual, weight, shift, dropout=None, eps=1e-5, centered=True, keep_result=False):
    """``(total, norm(total))`` of ``total = dropout(x + bias) + residual``."""
    _check_size(x, bias=bias, weight=weight, shift=shift)
    if not by_kernel(x):
        total = _dropout_formula(x, bias, residual, dropout)
        return total, _norm_formula(total, weight, shift, eps, centered)
    return _DropoutAddNorm.apply(x, bias, residual, weight, shift, dropout, eps, centered, keep_result)


def activation(x, bias=None, kind="gelu_tanh", gated=False):
    """``kind`` (gelu_tanh, gelu, relu or silu) of ``x + bias``. ``gated``: the last dimension is a gate and then a
    value, and the result is ``kind(gate) * value``. Source of GELU: Hendrycks and Gimpel 2016."""
    _check_size(x, bias=bias)
    if kind not in ACTIVATIONS:
        raise ValueError(f"the activation {kind!r} is not one of {', '.join(ACTIVATIONS)}")
    if gated and x.shape[-1] % 2:
        raise ValueError(f"a gated activation halves rows, and {x.shape[-1]} elements have no half")
    if not by_kernel(x):
        return _activation_formula(x, bias, kind, gated)
    return _Activation.apply(x, bias, kind, gated)


def rotary(x, positions, rotated=None, base=10000.0, interleaved=False):
    """Turns features of heads by their token's position.

    Args:
        x: ``[..., tokens, heads, size]``. positions: whole numbers, one for each token (``[..., tokens]``, or
            ``[tokens]``).
        rotated: the first features, an even number, that turn; None: all. Pair p turns by
            ``position * base ** (-2 p / rotated)``.
        interleaved: pairs are neighbours; else feature p and p + rotated / 2.

    Source: Su et al. 2021, "RoFormer".
    """
    size, tokens = x.shape[-1], x.shape[:-2]
    rotated = size if rotated is None else rotated
    if rotated % 2 or not 0 <= rotated <= size:
        raise ValueError(f"rotated is {rotated}: it is an even number of the {size} features of a head")
    if tuple(positions.shape) not in (tuple(tokens), tuple(tokens[-1:])):
        raise ValueError(
            f"positions have the shape {tuple(positions.shape)}: for x of {tuple(x.shape)} it is {tuple(tokens)}"
        )
    places = positions.expand(tokens)
    if not by_kernel(x):
        return _rotary_formula(x, places, rotated, base, interleaved)
    return _Rotary.apply(x, places, (rotated, float(base), interleaved))


def linear(x, weight, bias=None):
    """``x weight^T + bias``; 16-bit products on the CPU add in fp32."""
    return add_in_fp32(torch.nn.functional.linear, x, weight, bias)

"""The costs of operators: one table from their names to multiply-accumulates (MACs), other operations and bytes.

The rules: a MAC is two flops. The bias of a convolution is one flop for each output, pooling one for each input,
softmax one for each element, a normalization four for each element and one more with weights. The bias of a linear
layer and what works on each element by itself (activation functions, sums, dropout, losses) count none. Their backward
counts what it does: a product has two products, the others count as in forward. Fused attention counts its products and
its softmax, masked scores too. An operator that is a composition of others is counted by these.

``CountedOps`` counts what runs inside of it:

>>> with CountedOps() as counted:
...     loss = model(batch); loss.backward()
>>> counted.flops, counted.macs, counted.bytes
"""

import collections
import functools
import math
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Cost(NamedTuple):
    """The cost of one call. ``other``: the flops besides the two of each MAC. ``bytes``: read and written."""

    macs: int = 0
    other: int = 0
    bytes: int = 0

    @property
    def flops(self):
        return 2 * self.macs + self.other


def _words(text, form="aten::{}"):
    return [form.format(word) for word in text.split()]


# Nothing is computed and no memory is touched.
_FREE = {
    *_words(
        "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view lift lift_fresh lift_fresh_copy "
        "unsafe_split unsafe_split_with_sizes unsafe_chunk detach is_same_size"
    )
}
# Operators that work on each element by itself, make values, move them, sort, choose or add up.
_NONE = {
    *_words(
        "add sub rsub mul div true_divide floor_divide remainder fmod neg abs sign exp exp2 expm1 log log2 log10 log1p "
        "pow sqrt rsqrt reciprocal square sin cos tan tanh sinh cosh asin acos atan atan2 erf erfc erfinv sigmoid "
        "logit sgn floor ceil round trunc frac lerp addcmul addcdiv clamp clamp_min clamp_max maximum minimum fmax "
        "fmin relu relu6 leaky_relu elu celu selu silu gelu glu mish softplus hardtanh hardswish hardsigmoid "
        "hardshrink softshrink log_sigmoid_forward prelu _prelu_kernel threshold rrelu_with_noise dropout "
        "native_dropout bernoulli eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and "
        "bitwise_or bitwise_not bitwise_xor isnan isinf isfinite where masked_fill masked_scatter masked_select "
        "nan_to_num zeros zeros_like ones ones_like full full_like arange linspace eye rand rand_like randn randn_like "
        "randint randint_like randperm uniform normal exponential random tril triu tril_indices triu_indices zero fill "
        "scalar_tensor new_zeros new_ones new_full copy clone to _to_copy cat stack split_with_sizes_copy repeat "
        "repeat_interleave roll flip pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d "
        "replication_pad2d index index_put _index_put_impl index_select index_add index_copy index_fill gather scatter "
        "scatter_add scatter_reduce take embedding embedding_renorm one_hot bucketize searchsorted nonzero unique "
        "_unique2 sort argsort topk sum nansum amax amin max min argmax argmin any all prod cumsum cumprod logsumexp "
        "_log_softmax _log_softmax_backward_data nll_loss nll_loss_forward nll_loss2d_forward mse_loss l1_loss "
        "smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div _ctc_loss norm "
        "linalg_vector_norm var var_mean std xlogy item _local_scalar_dense equal is_nonzero resize set record_stream "
        "_foreach_add _foreach_mul _amp_foreach_non_finite_check_and_unscale _assert_async _resize_output complex real "
        "polar view_as_complex upsample_nearest1d upsample_nearest2d upsample_nearest3d pixel_shuffle pixel_unshuffle "
        "channel_shuffle im2col col2im _thnn_fused_lstm_cell _thnn_fused_gru_cell _cudnn_init_dropout_state "
        "_pack_padded_sequence _cudnn_rnn_flatten_weight miopen_rnn_flatten_weight"
    ),
    *_words(
        "tanh sigmoid threshold gelu silu mish elu glu leaky_relu hardtanh hardswish hardsigmoid softplus softshrink "
        "hardshrink log_sigmoid _prelu_kernel prelu rrelu_with_noise native_dropout embedding_dense embedding nll_loss "
        "nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div _ctc_loss "
        "value_selecting_reduction select slice diagonal as_strided unfold index_select gather constant_pad_nd "
        "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d upsample_nearest1d upsample_nearest2d "
        "upsample_nearest3d _thnn_fused_lstm_cell _thnn_fused_gru_cell logit masked_select _pack_padded_sequence",
        "aten::{}_backward",
    ),
    *_words("permute_rows combine_rows dot_rows", "deepspeed::{}"),
}
_QUIET = ("c10d::", "_c10d_functional::", "c10d_functional::", "prim::", "profiler::")
_formulas = {}  # name -> formula


def costs(*names):
    """Decorator: ``(out, *args, **kwargs) -> (macs, other)`` is the formula of these operators (``"aten::mm"``), also
    of their forms that work in place or take ``out=``. ``out`` is what the operator returns."""

    def register(formula):
        _formulas.update(dict.fromkeys(names, formula))
        return formula

    return register


def _convolved(x, out, weight, transposed):
    """MACs: of a transposed convolution each input, of others each output takes part in as many."""
    return (x if transposed else out).numel() * math.prod(weight.shape[1:])


def _scores(q, k):
    return q.numel() // q.shape[-1] * k.shape[-2]


def _recurrent(x, weights):
    """MACs: each matrix is used once for each token."""
    return x.numel() // x.shape[-1] * sum(one.numel() for one in weights if one is not None and one.dim() > 1)


def _whole_attention(q, k, heads):
    """Attention with the four products around it, of ``[batch, tokens, width]``."""
    width, scores = q.shape[-1], q.shape[0] * q.shape[1] * k.shape[1]
    return 2 * (q.numel() + k.numel()) * width + 2 * scores * width, heads * scores


def _encoder_layer(x, heads, wide):
    macs, softmax = _whole_attention(x, x, heads)
    return macs + 2 * x.numel() * wide, softmax + 2 * 5 * x.numel()


def _pools(dims, keepdim):
    """Whether a mean is how pooling to one value arrives: over the last two or three dimensions, which stay."""
    return keepdim and sorted(dims) in ([-2, -1], [-3, -2, -1])


_FUSED = _words(
    "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention", "aten::_scaled_dot_product_{}"
)
_POOLS = "avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d " + (
    "_adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d"
)
_NORMS = "native_batch_norm cudnn_batch_norm miopen_batch_norm native_group_norm _native_batch_norm_legit " + (
    "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update"
)
# Names of operators -> their formula.
for _names, _formula in {
    # ---- products
    "mm bmm mv dot vdot _int_mm _scaled_mm": lambda out, a, b, *_, **__: (out.numel() * a.shape[-1], 0),
    "addmm baddbmm addmv _addmm_activation": lambda out, bias, a, b, *_, **__: (out.numel() * a.shape[-1], 0),
    "addbmm": lambda out, bias, a, b, **__: (a.numel() * b.shape[-1], 0),
    "addr": lambda out, *_, **__: (out.numel(), 0),
    # ---- convolutions
    "convolution _convolution convolution_overrideable": lambda out, x, weight, bias, *args: (
        _convolved(x, out, weight, args[3]),
        0 if bias is None else out.numel(),
    ),
    "convolution_backward convolution_backward_overrideable": lambda out, grad, x, weight, *args: (
        sum(args[-1][:2]) * _convolved(x, grad, weight, args[-4]),
        grad.numel() if args[-1][2] else 0,
    ),
    # ---- attention with the products around it
    "_native_multi_head_attention": lambda out, q, k, v, width, heads, *_, **__: _whole_attention(q, k, heads),
    "_transformer_encoder_layer_fwd": lambda out, x, width, heads, *args, **__: _encoder_layer(
        x, heads, args[11].shape[0]
    ),
    # ---- recurrent layers
    "_cudnn_rnn miopen_rnn": lambda out, x, weights, *_, **__: (_recurrent(x, weights), 0),
    "_cudnn_rnn_backward miopen_rnn_backward": lambda out, x, weights, *_, **__: (2 * _recurrent(x, weights), 0),
    "mkldnn_rnn_layer": lambda out, x, *args, **__: (_recurrent(x, args[:2]), 0),
    "mkldnn_rnn_layer_backward": lambda out, x, *args, **__: (2 * _recurrent(x, args[:2]), 0),
    # ---- one or some for each element
    f"{_POOLS} avg_pool1d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d adaptive_max_pool1d _softmax softmax "
    "_safe_softmax _masked_softmax": lambda out, x, *_, **__: (0, x.numel()),
    f"{_POOLS} _masked_softmax".replace(" ", "_backward ")
    + "_backward _softmax_backward_data upsample_linear1d upsample_bilinear2d upsample_trilinear3d "
    "upsample_bicubic2d": lambda out, *_, **__: (0, out.numel()),
    "mean": lambda out, x, dims=(), keepdim=False, **__: (0, x.numel() if _pools(dims, keepdim) else 0),
    "_embedding_bag _embedding_bag_forward_only": lambda out, weight, rows, *_, **__: (
        0,
        rows.numel() * weight.shape[1],
    ),
    "native_layer_norm _fused_rms_norm": lambda out, x, shape, weight=None, *_, **__: (
        0,
        (4 if weight is None else 5) * x.numel(),
    ),
    _NORMS: lambda out, x, weight=None, *_, **__: (0, (4 if weight is None else 5) * x.numel()),
    f"{_NORMS} native_layer_norm batch_norm _fused_rms_norm".replace(" ", "_backward ") + "_backward": (
        lambda out, grad, *_, **__: (0, 5 * grad.numel())
    ),
}.items():
    costs(*_words(_names))(_formula)


def is_attention(name):
    """Whether the operator is fused attention or its backward."""
    return name.removesuffix("_backward") in (*_FUSED, "deepspeed::attention", "deepspeed::block_attention")


@costs(*_FUSED, "deepspeed::attention")
def _attention(out, q, k, v, *_, **__):
    return _scores(q, k) * (q.shape[-1] + v.shape[-1]), _scores(q, k)


@costs(*(f"{name}_backward" for name in _FUSED), "deepspeed::attention_backward")
def _attention_backward(out, grad, q, k, v, *_, **__):
    """Scores again, then the gradients of probabilities, values, queries and keys."""
    return _scores(q, k) * (3 * q.shape[-1] + 2 * v.shape[-1]), _scores(q, k)


@costs("deepspeed::block_attention")
def _block_attention(out, q, k, v, share):
    """Attention of the ``share`` of all scores that a layout has."""
    return tuple(int(share * one) for one in _attention(out, q, k, v))


@costs("deepspeed::block_attention_backward")
def _block_attention_backward(out, grad, q, k, v, share):
    return tuple(int(share * one) for one in _attention_backward(out, grad, q, k, v))


@costs("deepspeed::block_attention_bias")
def _block_attention_bias(out, grad, q, k, v, share):
    """Scores again, and the gradients of probabilities; their sum."""
    scores = int(share * _scores(q, k))
    return scores * (q.shape[-1] + v.shape[-1]), 2 * scores


_LAYER_OPS = {
    "deepspeed::norm": lambda out, x: (0, 5 * x.numel()),
    "deepspeed::norm_backward": lambda out, grad: (0, 5 * grad.numel()),
    "deepspeed::activation": lambda out, x: (0, out.numel()),
    "deepspeed::activation_backward": lambda out, grad, x: (0, grad.numel()),
    "deepspeed::bias_dropout_residual": lambda out, x, *more: (0, out.numel() * (1 + sum(m is not None for m in more))),
    "deepspeed::rotary": lambda out, x: (0, 3 * out.numel()),
}
for _names, _formula in _LAYER_OPS.items():
    costs(_names)(_formula)

costs("deepspeed::grouped_linear")(lambda out, x, weights: (x.numel() * out.shape[-1], 0))
costs("deepspeed::encode_floats")(lambda out, x: (0, 3 * x.numel()))
costs("deepspeed::decode_floats")(lambda out, rows: (0, 2 * out.numel()))
costs("deepspeed::fake_quant")(lambda out: (0, 4 * out.numel()))
costs("deepspeed::topk_gate")(lambda out, logits: (0, logits.numel()))


# ---- counting --------------------------------------------------------------------------------------------------------
def tensors_in(values):
    """The tensors of arguments or results: themselves, in lists and in tuples."""
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from tensors_in(one)


def _size(values):
    return sum(one.numel() * one.element_size() for one in tensors_in(values))


def _plain(name):
    """The operator without the mark of its form in place."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@functools.cache
def is_view(func):
    """Whether the operator returns a view of an argument."""
    returned = func._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write


@functools.cache
def _is_composition(func):
    """Whether the operator is made of others, which ``func.decompose`` calls."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in getattr(func, "py_kernels", ()) or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def known(name):
    """Whether the table has a row for ``name``: a formula, or that it counts none."""
    name = _plain(name)
    return name in _formulas or name in _NONE or name in _FREE or name.startswith(_QUIET)


def cost_of(name, args, kwargs, out):
    """The ``Cost`` of a call, which is no view. Of an operator without a row bytes alone are known."""
    name = _plain(name)
    if name in _FREE or name.startswith(_QUIET):
        return Cost()
    macs, other = _formulas[name](out, *args, **kwargs) if name in _formulas else (0, 0)
    if name == "aten::embedding":  # it reads the rows that it is asked for
        return Cost(macs, other, 2 * _size([out]) + _size(args[1:2]))
    return Cost(macs, other, _size([out, *args, *kwargs.values()]))


class CountedOps(TorchDispatchMode):
    """A mode that adds up the cost of all operators that run inside of it, in backward too.

    ``macs``, ``flops``, ``bytes``: the sums. ``not_counted``: ``{name: calls}`` of operators without a row.
    ``on_op(name, cost, operands, out)`` is called after each one, with the tensors among its arguments; not for views.
    """

    supports_higher_order_operators = True

    def __init__(self, on_op=None):
        super().__init__()
        self.on_op = on_op
        self.clear()

    def clear(self):
        """Sums begin again."""
        self.macs = self.other = self.bytes = 0
        self.not_counted = collections.Counter()

    @property
    def flops(self):
        return 2 * self.macs + self.other

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.count(func, args, kwargs or {})

    def count(self, func, args, kwargs):
        """Runs an operator and adds it, outside of the mode."""
        if not hasattr(func, "_schema"):  # an operator of operators, such as flex_attention, which runs as a whole
            self.not_counted[str(func)] += 1
            return func(*args, **kwargs)
        name = func._schema.name
        if _is_composition(func) and not known(name):  # in inference mode they come whole
            with self:
                return func.decompose(*args, **kwargs)
        out = self.call(func, args, kwargs)
        if not is_view(func):
            self.add(name, args, kwargs, out)
        return out

    def call(self, func, args, kwargs):
        """Runs an operator; subclasses may run it in another way."""
        return func(*args, **kwargs)

    def kernel_ran(self, name, out, *args):
        """A kernel of this library, which torch does not see: ``_native.tell_modes``."""
        self.add(f"deepspeed::{name}", args, {}, out)

    def add(self, name, args, kwargs, out):
        """Adds a call that has been made."""
        if not known(name):
            self.not_counted[name] += 1
        cost = cost_of(name, args, kwargs, out)
        self._sum(cost)
        if self.on_op is not None:
            self.on_op(name, cost, [*tensors_in([*args, *kwargs.values()])], out)

    def _sum(self, cost):
        self.macs, self.other, self.bytes = self.macs + cost.macs, self.other + cost.other, self.bytes + cost.bytes

"""What operators cost: one table from the names of operators to multiply-accumulates (MACs), other operations and bytes.

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
import math
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Cost(NamedTuple):
    """Of one call. ``other``: the flops besides the two of each MAC. ``bytes``: read and written."""

    macs: int = 0
    other: int = 0
    bytes: int = 0

    @property
    def flops(self):
        return 2 * self.macs + self.other


_formulas = {}


def costs(*names):
    """Decorator: ``(out, *args, **kwargs) -> (macs, other)`` is the formula of these operators (``"aten::mm"``), also of
    their forms that work in place or take ``out=``. ``out`` is what the operator returns."""

    def register(formula):
        _formulas.update(dict.fromkeys(names, formula))
        return formula

    return register


def _words(text, form="aten::{}"):
    return [form.format(word) for word in text.split()]


# Nothing is computed and no memory is touched.
_FREE = {
    *_words(
        "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view lift lift_fresh lift_fresh_copy "
        "unsafe_split unsafe_split_with_sizes unsafe_chunk detach is_same_size"
    )
}
# What works on each element by itself, makes values, moves them, sorts, chooses or adds up.
_NONE = {
    *_words(
        "add sub rsub mul div true_divide floor_divide remainder fmod neg abs sign exp exp2 expm1 log log2 log10 log1p "
        "pow sqrt rsqrt reciprocal square sin cos tan tanh sinh cosh asin acos atan atan2 erf erfc erfinv sigmoid "
        "logit sgn floor ceil round trunc frac lerp addcmul addcdiv clamp clamp_min clamp_max maximum minimum fmax fmin "
        "relu relu6 leaky_relu elu celu selu silu gelu glu mish softplus hardtanh hardswish hardsigmoid hardshrink "
        "softshrink log_sigmoid_forward prelu _prelu_kernel threshold rrelu_with_noise dropout native_dropout bernoulli "
        "eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not "
        "bitwise_xor isnan isinf isfinite where masked_fill masked_scatter masked_select nan_to_num "
        "zeros zeros_like ones ones_like full full_like arange linspace eye rand rand_like randn randn_like randint "
        "randint_like randperm uniform normal exponential random tril triu tril_indices triu_indices zero fill "
        "scalar_tensor new_zeros new_ones new_full copy clone to _to_copy cat stack split_with_sizes_copy repeat "
        "repeat_interleave roll flip pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d "
        "replication_pad2d index index_put _index_put_impl index_select index_add index_copy index_fill gather scatter "
        "scatter_add scatter_reduce take embedding embedding_renorm one_hot bucketize searchsorted nonzero unique "
        "_unique2 sort argsort topk sum nansum amax amin max min argmax argmin any all prod cumsum cumprod logsumexp "
        "_log_softmax nll_loss nll_loss_forward nll_loss2d_forward mse_loss l1_loss smooth_l1_loss huber_loss "
        "binary_cross_entropy binary_cross_entropy_with_logits kl_div _ctc_loss norm linalg_vector_norm var var_mean std "
        "item _local_scalar_dense equal is_nonzero resize set record_stream _foreach_add _foreach_mul "
        "_amp_foreach_non_finite_check_and_unscale _assert_async _resize_output complex real polar view_as_complex "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d pixel_shuffle pixel_unshuffle channel_shuffle im2col "
        "col2im _nested_tensor_from_mask _thnn_fused_lstm_cell _thnn_fused_gru_cell _cudnn_init_dropout_state "
        "_pack_padded_sequence _cudnn_rnn_flatten_weight miopen_rnn_flatten_weight result_type"
    ),
    *_words(
        "tanh sigmoid threshold gelu silu mish elu glu leaky_relu hardtanh hardswish hardsigmoid softplus softshrink "
        "hardshrink log_sigmoid _prelu_kernel prelu rrelu_with_noise native_dropout embedding_dense embedding "
        "_log_softmax_data_backward nll_loss nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
        "kl_div _ctc_loss value_selecting_reduction select slice diagonal as_strided unfold index_select gather "
        "constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d _thnn_fused_lstm_cell _thnn_fused_gru_cell logit masked_select "
        "_pack_padded_sequence",
        "aten::{}_backward",
    ),
    "aten::_log_softmax_backward_data",
    *_words("permute_rows combine_rows dot_rows", "deepspeed::{}"),
}
_QUIET = ("c10d::", "_c10d_functional::", "c10d_functional::", "prim::", "profiler::")


# ---- products --------------------------------------------------------------------------------------------------------
@costs(*_words("mm bmm mv dot vdot _int_mm _scaled_mm"))
def _product(out, a, b, *args, **kwargs):
    return out.numel() * a.shape[-1], 0


@costs(*_words("addmm baddbmm addmv _addmm_activation sspaddmm"))
def _added_product(out, bias, a, b, *args, **kwargs):
    return out.numel() * a.shape[-1], 0


@costs("aten::addbmm")
def _summed_products(out, bias, a, b, **kwargs):
    return a.numel() * b.shape[-1], 0


@costs("aten::addr")
def _outer(out, bias, a, b, **kwargs):
    return out.numel(), 0


@costs("deepspeed::grouped_linear")
def _grouped_linear(out, x, weights):
    return x.numel() * out.shape[-1], 0


# ---- convolutions ----------------------------------------------------------------------------------------------------
def _convolved(small, weight):
    """``small``: the output, or of a transposed convolution the input."""
    return small.numel() * math.prod(weight.shape[1:])


@costs(*_words("convolution _convolution convolution_overrideable"))
def _convolution(out, x, weight, bias, stride, padding, dilation, transposed, *args, **kwargs):
    return _convolved(x if transposed else out, weight), 0 if bias is None else out.numel()


@costs(*_words("convolution_backward convolution_backward_overrideable"))
def _convolution_backward(out, grad, x, weight, *args, **kwargs):
    transposed, mask = args[-4], args[-1]
    products = sum(map(bool, mask[:2]))
    return products * _convolved(x if transposed else grad, weight), grad.numel() if mask[2:] and mask[2] else 0


# ---- attention -------------------------------------------------------------------------------------------------------
_FUSED = _words(
    "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention", "aten::_scaled_dot_product_{}"
)


@costs(*_FUSED, "deepspeed::attention")
def _attention(out, q, k, v, *args, **kwargs):
    scores = q.numel() // q.shape[-1] * k.shape[-2]
    return scores * (q.shape[-1] + v.shape[-1]), scores


@costs(*(f"{name}_backward" for name in _FUSED), "deepspeed::attention_backward")
def _attention_backward(out, grad, q, k, v, *args, **kwargs):
    """Scores again, then the gradients of probabilities, values, queries and keys."""
    scores = q.numel() // q.shape[-1] * k.shape[-2]
    return scores * (3 * q.shape[-1] + 2 * v.shape[-1]), scores


@costs("aten::_native_multi_head_attention")
def _whole_attention(out, q, k, v, width, heads, qkv_weight, qkv_bias, proj_weight, *args, **kwargs):
    tokens, others, scores = q.numel() // width, k.numel() // width, q.shape[0] * q.shape[1] * k.shape[1]
    return (2 * tokens + 2 * others) * width * width + 2 * scores * width, heads * scores


@costs("aten::_transformer_encoder_layer_fwd")
def _encoder_layer(out, x, width, heads, *args, **kwargs):
    """``args``: four of attention, gelu, norm first, eps, four of the norms, then the weights between."""
    macs, softmax = _whole_attention(None, x, x, x, width, heads, None, None, None)
    return macs + 2 * x.numel() * args[11].shape[0], softmax + 2 * 5 * x.numel()


# ---- recurrent layers: each weight matrix is used once for each token --------------------------------------------------
def _recurrent(x, weights):
    return x.numel() // x.shape[-1] * sum(one.numel() for one in weights if one is not None and one.dim() > 1)


@costs(*_words("_cudnn_rnn miopen_rnn"))
def _rnn(out, x, weights, *args, **kwargs):
    return _recurrent(x, weights), 0


@costs(*_words("_cudnn_rnn_backward miopen_rnn_backward"))
def _rnn_backward(out, x, weights, *args, **kwargs):
    return 2 * _recurrent(x, weights), 0


@costs("aten::mkldnn_rnn_layer")
def _rnn_layer(out, x, *weights, **kwargs):
    return _recurrent(x, weights[:2]), 0


@costs("aten::mkldnn_rnn_layer_backward")
def _rnn_layer_backward(out, x, *weights, **kwargs):
    return 2 * _recurrent(x, weights[:2]), 0


# ---- one or some for each element ------------------------------------------------------------------------------------
@costs(
    *_words(
        "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
        "max_pool3d_with_indices adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool1d "
        "adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d _softmax softmax "
        "_safe_softmax _masked_softmax"
    )
)
def _of_inputs(out, x, *args, **kwargs):
    return 0, x.numel()


@costs(
    *_words(
        "avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d _adaptive_avg_pool3d "
        "adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d _masked_softmax",
        "aten::{}_backward",
    ),
    *_words("upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"),
    "aten::_softmax_backward_data",
)
def _of_outputs(out, *args, **kwargs):
    return 0, out.numel()


@costs("aten::mean")
def _mean(out, x, dims=(), keepdim=False, **kwargs):
    """Over the last two or three dimensions, which stay, it is how pooling to one value arrives."""
    pools = keepdim and sorted(dims) in ([-2, -1], [-3, -2, -1])
    return 0, x.numel() if pools else 0


@costs("deepspeed::topk_gate")
def _gate(out, logits):
    return 0, logits.numel()


@costs(*_words("_embedding_bag _embedding_bag_forward_only"))
def _bag(out, weight, indices, *args, **kwargs):
    return 0, indices.numel() * weight.shape[1]


@costs(*_words("native_layer_norm _fused_rms_norm"))
def _layer_norm(out, x, shape, weight=None, *args, **kwargs):
    return 0, (4 if weight is None else 5) * x.numel()


@costs(
    *_words(
        "native_batch_norm cudnn_batch_norm miopen_batch_norm native_group_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update"
    )
)
def _norm(out, x, weight=None, *args, **kwargs):
    return 0, (4 if weight is None else 5) * x.numel()


@costs(
    *_words(
        "native_layer_norm native_batch_norm cudnn_batch_norm miopen_batch_norm native_group_norm batch_norm "
        "_fused_rms_norm",
        "aten::{}_backward",
    )
)
def _norm_backward(out, grad, *args, **kwargs):
    return 0, 5 * grad.numel()


# ---- counting --------------------------------------------------------------------------------------------------------
def tensors_in(values):
    """The tensors of arguments or results: themselves, in lists and in tuples."""
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from tensors_in(one)


def _size(tensors):
    return sum(one.numel() * one.element_size() for one in tensors)


def _plain(name):
    """The operator without the mark of its form in place."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _is_view(func):
    returned = func._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write


def known(name):
    """Whether the table has a row for ``name``: a formula, or that it counts none."""
    name = _plain(name)
    return name in _formulas or name in _NONE or name in _FREE or name.startswith(_QUIET)


def cost_of(name, args, kwargs, out):
    """The ``Cost`` of a call, which is no view. Of an operator without a row bytes alone are known."""
    name = _plain(name)
    if name in _FREE or name.startswith(_QUIET):
        return Cost()
    formula = _formulas.get(name)
    macs, other = formula(out, *args, **kwargs) if formula is not None else (0, 0)
    written = _size(tensors_in([out]))
    if name == "aten::embedding":  # it reads the rows that it is asked for
        return Cost(macs, other, 2 * written + _size(tensors_in(args[1:2])))
    return Cost(macs, other, written + _size(tensors_in([*args, *kwargs.values()])))


class CountedOps(TorchDispatchMode):
    """A mode that adds up the cost of all operators that run inside of it, in backward too.

    ``macs``, ``flops``, ``bytes``: the sums. ``not_counted``: ``{name: calls}`` of operators without a row in the table.
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
        kwargs = kwargs or {}
        if not hasattr(func, "_schema"):  # an operator of operators, such as flex_attention, which runs as a whole
            self.not_counted[str(func)] += 1
            return func(*args, **kwargs)
        name = func._schema.name
        if not known(name):
            with self:  # in inference mode compositions come whole
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if not _is_view(func):
            self.add(name, args, kwargs, out)
        return out

    def kernel_ran(self, name, out, *args):
        """A kernel of this library, which torch does not see: ``_native.tell_modes``."""
        self.add(f"deepspeed::{name}", args, {}, out)

    def add(self, name, args, kwargs, out):
        """Adds a call that has been made."""
        if not known(name):
            self.not_counted[name] += 1
        cost = cost_of(name, args, kwargs, out)
        self.macs, self.other, self.bytes = self.macs + cost.macs, self.other + cost.other, self.bytes + cost.bytes
        if self.on_op is not None:
            self.on_op(name, cost, [*tensors_in([*args, *kwargs.values()])], out)

"""Reads Megatron's ``TransformerConfig``, or its arguments, for ``DominoTransformer``; and the enumerations that
Megatron's scripts pass with it. Members are compared by name, so that those of Megatron itself are understood."""

import dataclasses
import enum
import math
from typing import Callable

import torch
from torch.nn import functional as F


class ModelType(enum.Enum):
    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4


class LayerType(enum.Enum):
    encoder = 1
    decoder = 2
    retro_encoder = 3
    retro_decoder = 4
    retro_decoder_with_retriever = 5


class AttnType(enum.Enum):
    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4


_NOTHING = (None, False, 0, 1, [1], (-1, -1))  # values of the attributes below that ask for nothing
_REFUSED = {  # attribute of the configuration -> what to do instead
    "sequence_parallel": "leave out --sequence-parallel: all ranks need whole activations between the layers",
    "context_parallel_size": "set it to 1",
    "virtual_pipeline_model_parallel_size": "leave it out: a rank has one run of layers",
    "recompute_granularity": "leave it out, or run the whole transformer under deepspeed.checkpointing.checkpoint",
    "num_moe_experts": "leave it out, or use deepspeed.moe",
    "num_experts": "leave it out, or use deepspeed.moe",
    "layernorm_zero_centered_gamma": "set it to False",
    "apply_layernorm_1p": "set it to False",
    "qk_layernorm": "set it to False",
    "window_size": "leave it out: attention is not limited to a window",
    "multi_latent_attention": "set it to False",
    "fp8": "leave it out: layers compute in params_dtype",
    "cpu_offloading": "set it to False, and use deepspeed.checkpointing with checkpoint_in_cpu",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The numbers of a transformer, whole (not of one rank). ``shared_heads``: heads of keys and values. ``first``: the
    number of the first layer of this stage of a pipeline, which has ``layers`` of ``all_layers``."""

    hidden: int
    inner: int
    heads: int
    shared_heads: int
    head_dim: int
    layers: int
    all_layers: int
    first: int
    hidden_dropout: float
    attention_dropout: float
    epsilon: float
    normalization: str
    residual_behind_norm: bool
    softmax_in_fp32: bool
    scales_by_layer: bool
    bias: bool
    attention_bias: bool
    gated: bool
    activation: Callable
    init: Callable
    output_init: Callable
    dtype: torch.dtype
    fp32_residual: bool


class _Reader:
    """Attributes of ``config``; None counts as missing."""

    def __init__(self, config):
        self.config = config

    def __call__(self, name, default=None):
        found = getattr(self.config, name, None)
        return default if found is None else found

    def size(self, name, default=None):
        """A whole number of at least 1; ValueError for anything else, and where there is neither it nor a default."""
        found = self(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise ValueError(f"DominoTransformer: config.{name} is {found!r}, and it must be a whole number >= 1")
        return found

    def share(self, name):
        """The probability of a dropout."""
        found = self(name, 0.1)
        if not 0 <= found < 1:
            raise ValueError(f"DominoTransformer: config.{name} is {found!r}, and it must be at least 0 and below 1")
        return float(found)


def read(config, ranks=1, stages=1, stage=0):
    """The ``Settings`` in ``config``. Missing attributes have the defaults of Megatron's ``TransformerConfig``. Those
    that choose between fused kernels change no result and are not read.

    ranks: how many share each layer. stages, stage: of the pipeline. ValueError names an attribute that cannot be
    honoured, and what to do.
    """
    of = _Reader(config)
    for name, instead in _REFUSED.items():
        if of(name) is True or of(name) not in _NOTHING:
            raise ValueError(f"DominoTransformer does not support config.{name} = {of(name)!r}: {instead}")
    hidden, heads, all_layers = (of.size(name) for name in ("hidden_size", "num_attention_heads", "num_layers"))
    if of("kv_channels") is None and hidden % heads:
        raise ValueError(f"DominoTransformer: {heads} attention heads do not divide config.hidden_size = {hidden}")
    inner = of.size("ffn_hidden_size", 4 * hidden)
    grouped = of("group_query_attention", True)
    shared_heads = of.size("num_query_groups", heads) if grouped else heads
    if heads % shared_heads:
        raise ValueError(
            f"DominoTransformer: num_query_groups = {shared_heads} does not divide {heads} attention heads"
        )
    for name, number in (
        ("num_attention_heads", heads),
        ("num_query_groups", shared_heads),
        ("ffn_hidden_size", inner),
    ):
        if number % ranks:
            raise ValueError(
                f"DominoTransformer: {ranks} tensor-parallel ranks do not divide config.{name} = {number}: choose a "
                "tensor-parallel size that does"
            )
    if all_layers % stages:
        raise ValueError(f"DominoTransformer: {stages} pipeline stages do not divide config.num_layers = {all_layers}")
    normalization = of("normalization", "LayerNorm")
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f"DominoTransformer: config.normalization is {normalization!r}: use 'LayerNorm' or 'RMSNorm'")
    deviation, bias = of("init_method_std", 0.02), of("add_bias_linear", True)
    by_layer = of("apply_query_key_layer_scaling", False)
    filled = of("perform_initialization", True)
    gated, activation = _unit(of)
    return Settings(
        hidden=hidden,
        inner=inner,
        heads=heads,
        shared_heads=shared_heads,
        head_dim=of.size("kv_channels", hidden // heads),
        layers=all_layers // stages,
        all_layers=all_layers,
        first=all_layers // stages * stage,
        hidden_dropout=of.share("hidden_dropout"),
        attention_dropout=of.share("attention_dropout"),
        epsilon=of("layernorm_epsilon", 1e-5),
        normalization=normalization,
        residual_behind_norm=of("apply_residual_connection_post_layernorm", False),
        softmax_in_fp32=of("attention_softmax_in_fp32", True) or by_layer,
        scales_by_layer=by_layer,
        bias=bias,
        attention_bias=bias or of("add_qkv_bias", False),
        gated=gated,
        activation=activation,
        init=of("init_method", _normal(deviation)) if filled else None,
        output_init=of("output_layer_init_method", _normal(deviation / math.sqrt(2 * all_layers))) if filled else None,
        dtype=of("params_dtype", torch.float32),
        fp32_residual=of("fp32_residual_connection", False),
    )


def _normal(deviation):
    return lambda tensor: torch.nn.init.normal_(tensor, 0.0, deviation)


def _unit(of):
    """``(gated, activation)``."""
    if of("swiglu", False):
        return True, F.silu
    if of("squared_relu", False):
        return False, lambda x: F.relu(x).square()
    if of("openai_gelu", False):
        return False, lambda x: F.gelu(x, approximate="tanh")
    return of("gated_linear_unit", False), of("activation_func", F.gelu)


def named(kind, given, known, instead):
    """The name of a member of an enumeration, also of Megatron's own; ValueError unless it is one of ``known``."""
    name = getattr(given, "name", given)
    if name not in known:
        raise ValueError(f"DominoTransformer: {kind} {given} is not supported: {instead}")
    return name

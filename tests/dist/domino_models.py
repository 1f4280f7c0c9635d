"""Random transformers for tests of Domino: a configuration as Megatron's, and the same model in plain torch."""

import functools
import random
import types

import torch
from torch.nn import functional as F

from deepspeed.module_inject.domino import DominoTransformer
from deepspeed.module_inject.domino_config import AttnMaskType, ModelType
from deepspeed.utils.param_cut import cut_of

HEADS, WIDTH, TOKENS = 6, 4, 5


def config_of(**more):
    """A configuration with no dropout."""
    made = dict(
        hidden_size=20, num_attention_heads=HEADS, kv_channels=WIDTH, num_layers=2, ffn_hidden_size=12,
        hidden_dropout=0.0, attention_dropout=0.0, layernorm_epsilon=1e-5,
        init_method=functools.partial(torch.nn.init.normal_, std=0.3),
        output_layer_init_method=functools.partial(torch.nn.init.normal_, std=0.3),
    )  # fmt: skip
    return types.SimpleNamespace(**{**made, **more})


def turned(tensor, angles):
    """Rotary positions. tensor: (tokens, samples, heads, width)."""
    first, second = tensor.chunk(2, -1)
    return tensor * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class Case:
    """A random configuration that ``ranks`` can share, with inputs. The same one on every rank."""

    def __init__(self, seed, ranks=1, **more):
        draw = random.Random(seed)
        pick = lambda *choices: draw.choice(choices)
        self.config = config_of(
            num_layers=pick(1, 2, 3),
            num_query_groups=pick(None, HEADS, ranks),
            gated_linear_unit=pick(False, True),
            activation_func=pick(F.gelu, F.silu, torch.tanh),
            normalization=pick("LayerNorm", "RMSNorm"),
            add_bias_linear=pick(False, True, True),
            add_qkv_bias=pick(False, True),
            apply_residual_connection_post_layernorm=pick(False, False, True),
            apply_query_key_layer_scaling=pick(False, True),
            fp32_residual_connection=pick(False, True),
        )
        vars(self.config).update(more)
        self.samples, self.rough = pick(1, 2, 3, 4), True
        self.mask_type = pick(AttnMaskType.causal, AttnMaskType.causal, AttnMaskType.padding)
        self.rotary, self.masked, self.post_layer_norm = (
            pick(False, True),
            pick(None, 1, self.samples),
            pick(True, False),
        )
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(TOKENS, self.samples, self.config.hidden_size, generator=generator)
        self.grad = torch.randn(self.x.shape, generator=generator)
        self.mask = None
        if self.masked is not None:
            self.mask = torch.rand(self.masked, 1, TOKENS, TOKENS, generator=generator) < 0.3
            self.mask[..., 0] = False  # each query sees a key
        self.angles = (
            torch.randn(TOKENS, 1, 1, WIDTH // 2, generator=generator).repeat(1, 1, 1, 2) if self.rotary else None
        )

    def model(self, mpu):
        """Slices of weights that are alike for any number of ranks."""
        torch.manual_seed(0)
        made = DominoTransformer(
            self.config, mpu, turned if self.rotary else None, ModelType.encoder_or_decoder,
            self_attn_mask_type=self.mask_type, post_layer_norm=self.post_layer_norm,
        )  # fmt: skip
        if self.rough:
            roughen(made)
        return made


@torch.no_grad()
def roughen(model):
    """Gives biases and norms values that differ, alike for any number of ranks."""
    for number, param in enumerate(model.parameters()):
        if param.dim() == 1:
            cut = cut_of(param)
            shape = param.shape if cut is None else cut.whole_shape(param.shape)
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 0.1
            param.add_((whole if cut is None else cut.own(whole)).to(param.dtype))


def whole_of(model, value=lambda param: param.data):
    """name -> the whole ``value`` of each parameter. Every rank calls it."""
    found = {}
    for name, param in model.named_parameters():
        cut = cut_of(param)
        found[name] = value(param).clone() if cut is None else cut.join(value(param))
    return found


def plain(case, weights, x):
    """The transformer, one sample and one head at a time. ``weights``: by Megatron's names."""
    config, made = case.config, []
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    for sample in range(x.shape[1]):
        row = x[:, sample]
        for number in range(layers):
            of = {name.split(".", 2)[2]: one for name, one in weights.items() if name.startswith(f"layers.{number}.")}
            for norm, part in (("input_layernorm", attention), ("post_attention_layernorm", unit)):
                normed = normalized(config, of, norm, row)
                before = normed if config.apply_residual_connection_post_layernorm else row
                row = before + part(case, of, normed, sample)
        made.append(normalized(config, weights, "final_layernorm", row) if case.post_layer_norm else row)
    return torch.stack(made, 1)


def linear(of, name, x):
    return F.linear(x, of[f"{name}.weight"], of.get(f"{name}.bias"))


def normalized(config, of, name, x):
    weight = of[f"{name}.weight"]
    if config.normalization == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], weight, of[f"{name}.bias"], config.layernorm_epsilon)
    return x / (x.square().mean(-1, keepdim=True) + config.layernorm_epsilon).sqrt() * weight


def attention(case, of, x, sample):
    groups = case.config.num_query_groups or HEADS
    made = []
    for run in linear(of, "self_attention.query_key_value", x).chunk(groups, -1):
        *queries, key, value = run.split(WIDTH, -1)
        for query in queries:
            q, k = query, key
            if case.rotary:
                q, k = (turned(one[:, None, None], case.angles)[:, 0, 0] for one in (query, key))
            scores = q @ k.t() / WIDTH**0.5
            hidden = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
            if case.mask is not None:
                hidden |= case.mask[min(sample, len(case.mask) - 1), 0]
            if case.mask_type == AttnMaskType.causal:
                hidden |= torch.arange(TOKENS)[None] > torch.arange(TOKENS)[:, None]
            made.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value)
    return linear(of, "self_attention.dense", torch.cat(made, -1))


def unit(case, of, x, _):
    made = linear(of, "mlp.dense_h_to_4h", x)
    if case.config.gated_linear_unit:
        gate, made = made.split(made.shape[-1] // 2, -1)
        return linear(of, "mlp.dense_4h_to_h", case.config.activation_func(gate) * made)
    return linear(of, "mlp.dense_4h_to_h", case.config.activation_func(made))

"""Layers of other packages as values of a ``DeepSpeedTransformerLayer``: where each of them keeps its weights."""

import copy
import inspect

import torch

from deepspeed.ops.transformer.config import DeepSpeedTransformerConfig

_FUSED = ("attn_qkvw", "attn_qkvb")


class _Reader:
    """One layer. ``places``: the parameters of our layer and the module's (modules, one or three, and their
    attribute)."""

    def __init__(self, layer):
        self.layer = layer

    def values(self):
        """Tensors by the names of our parameters."""
        return {name: torch.cat(ones) if name in _FUSED else ones[0] for name, ones in self._tensors().items()}

    def fill(self, values):
        """Copies ``values`` into the layer."""
        for name, ones in self._tensors().items():
            for one, value in zip(ones, values[name].chunk(len(ones))):
                one.copy_(value)

    def _tensors(self):
        places = self.places()
        if any(one.numel() == 0 for ones in places.values() for one in ones):
            raise ValueError(
                f"parameters of {type(self.layer).__name__} are sharded over ranks (ZeRO stage 3): convert it inside "
                "deepspeed.zero.GatheredParameters(layer.parameters(), modifier_rank=0), or before zero.Init"
            )
        return {name: [one.detach() for one in ones] for name, ones in places.items()}

    def configured(self, config):
        """A configuration of this layer's form, with what ``config`` says beside it; ValueError where it names other
        sizes."""
        if config is None:
            made = DeepSpeedTransformerConfig(training=self.layer.training, **self.dropout())
        else:
            self.compare(config, ("hidden_size", "heads", "intermediate_size"))
            made = copy.copy(config)
        for name, value in self.form().items():
            setattr(made, name, value)
        return made

    def compare(self, config, names):
        """ValueError if ``config`` has other values under ``names`` than this layer."""
        form = self.form()
        for name in names:
            if getattr(config, name) not in (-1, form[name]):
                raise ValueError(
                    f"{name} of the configuration is {getattr(config, name)}, and that of {type(self.layer).__name__} "
                    f"{form[name]}: both need the same"
                )


class _Bert(_Reader):
    def form(self):
        layer, attention = self.layer, self.layer.attention.self
        if getattr(layer, "is_decoder", False) or getattr(layer, "add_cross_attention", False):
            raise ValueError(
                f"{type(layer).__name__} is a decoder: DeepSpeedTransformerLayer looks both ways, without caches"
            )
        kind = getattr(attention, "position_embedding_type", "absolute")
        if kind != "absolute":
            raise ValueError(f"position_embedding_type is {kind!r}: DeepSpeedTransformerLayer has 'absolute' alone")
        act = layer.intermediate.intermediate_act_fn
        returned = inspect.signature(type(layer).forward).return_annotation
        return {
            "hidden_size": attention.query.in_features, "heads": attention.num_attention_heads,
            "intermediate_size": layer.intermediate.dense.out_features, "pre_layer_norm": False,
            "layer_norm_eps": layer.output.LayerNorm.eps, "activation": _activation(act, layer),
            "return_tuple": returned is not torch.Tensor and returned != "torch.Tensor",
        }  # fmt: skip

    def dropout(self):
        attention = self.layer.attention
        share = getattr(attention.self, "dropout", 0.0)
        return {
            "attn_dropout_ratio": share.p if isinstance(share, torch.nn.Dropout) else float(share),
            "hidden_dropout_ratio": attention.output.dropout.p,
        }

    def places(self):
        own, out = self.layer.attention.self, self.layer.attention.output
        inner, last = self.layer.intermediate.dense, self.layer.output
        parts = (own.query, own.key, own.value)
        return {
            "attn_qkvw": [one.weight for one in parts], "attn_qkvb": [one.bias for one in parts],
            "attn_ow": [out.dense.weight], "attn_ob": [out.dense.bias], "attn_nw": [out.LayerNorm.weight],
            "attn_nb": [out.LayerNorm.bias], "inter_w": [inner.weight], "inter_b": [inner.bias],
            "output_w": [last.dense.weight], "output_b": [last.dense.bias], "norm_w": [last.LayerNorm.weight],
            "norm_b": [last.LayerNorm.bias],
        }  # fmt: skip


class _Encoder(_Reader):
    """torch's. It has one dropout for attention and for the rest."""

    def form(self):
        layer, attention = self.layer, self.layer.self_attn
        if not attention.batch_first:
            raise ValueError(
                "TransformerEncoderLayer can be converted with batch_first=True: tensors are [batch, tokens, hidden]"
            )
        if attention.in_proj_bias is None or attention.in_proj_weight is None:
            raise ValueError(
                "TransformerEncoderLayer has no biases, or queries and keys of other sizes: it cannot be converted"
            )
        if layer.norm1.eps != layer.norm2.eps:
            raise ValueError(f"the norms have the eps {layer.norm1.eps} and {layer.norm2.eps}: they need the same")
        return {
            "hidden_size": attention.embed_dim, "heads": attention.num_heads,
            "intermediate_size": layer.linear1.out_features, "pre_layer_norm": bool(layer.norm_first),
            "layer_norm_eps": layer.norm1.eps, "activation": _activation(layer.activation, layer),
            "return_tuple": False,
        }  # fmt: skip

    def dropout(self):
        return {"attn_dropout_ratio": self.layer.self_attn.dropout, "hidden_dropout_ratio": self.layer.dropout1.p}

    def places(self):
        own, layer = self.layer.self_attn, self.layer
        # norm1 stands at attention, norm2 at the network: before them, or behind.
        behind, other = (layer.norm2, layer.norm1) if layer.norm_first else (layer.norm1, layer.norm2)
        return {
            "attn_qkvw": [own.in_proj_weight], "attn_qkvb": [own.in_proj_bias], "attn_ow": [own.out_proj.weight],
            "attn_ob": [own.out_proj.bias], "attn_nw": [behind.weight], "attn_nb": [behind.bias],
            "inter_w": [layer.linear1.weight], "inter_b": [layer.linear1.bias], "output_w": [layer.linear2.weight],
            "output_b": [layer.linear2.bias], "norm_w": [other.weight], "norm_b": [other.bias],
        }  # fmt: skip


def _activation(function, layer):
    """The name of an activation, by its values."""
    x = torch.linspace(-3, 3, 25, dtype=torch.float64)
    known = {
        "gelu_tanh": torch.nn.functional.gelu(x, approximate="tanh"),
        "gelu": torch.nn.functional.gelu(x),
        "relu": x.relu(),
        "silu": torch.nn.functional.silu(x),
    }
    with torch.no_grad():
        found = function(x)
    for name, values in known.items():
        if torch.allclose(found, values, rtol=0, atol=1e-6):
            return name
    raise ValueError(f"the activation of {type(layer).__name__} is not one of {', '.join(known)}")


def reader_of(layer):
    """Returns an object that reads ``layer``; TypeError for a class that cannot be converted."""
    if isinstance(layer, torch.nn.TransformerEncoderLayer):
        return _Encoder(layer)
    parts = ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.LayerNorm")
    if all(_has(layer, path) for path in parts):
        return _Bert(layer)
    raise TypeError(
        f"{type(layer).__name__} is neither a layer of transformers' BERT nor torch.nn.TransformerEncoderLayer: build "
        "a DeepSpeedTransformerLayer with initial_weights and initial_biases"
    )


def _has(module, path):
    for name in path.split("."):
        module = getattr(module, name, None)
        if module is None:
            return False
    return True

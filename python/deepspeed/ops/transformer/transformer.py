"""A transformer layer for training: products by torch, everything between them by kernels that keep little."""

import copy
from types import SimpleNamespace

import torch

from deepspeed._compat import autocast_dtype, memory_of, storage_of, without_autocast
from deepspeed.ops.attention import Dropped, attention
from deepspeed.ops.sparse_attention.layouts import layout_of
from deepspeed.ops.transformer import convert
from deepspeed.ops.transformer.config import DeepSpeedTransformerConfig, TransformerConfig
from deepspeed.ops.transformer.functions import (
    Dropout,
    activation,
    again,
    dropout_add,
    dropout_add_norm,
    linear,
    norm,
)

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer", "TransformerConfig"]

SMALLEST_WEIGHT = 1e-3  # of a norm that is inverted
_REFUSED = (
    "head_mask", "layer_head_mask", "encoder_hidden_states", "encoder_attention_mask", "past_key_value",
    "past_key_values", "cache",
)  # fmt: skip
_IGNORED = ("use_cache", "is_causal", "position_ids", "cache_position", "output_hidden_states", "return_dict")


def _attend_and_project(qkv, weight, heads, masks, dropped):
    """Attention of ``qkv`` ``[batch, tokens, 3 * hidden]``, and its product with ``weight``."""
    query, key, value = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in qkv.chunk(3, -1))
    found = attention(query, key, value, dropped=dropped, **masks)
    return linear(found.transpose(1, 2).flatten(2), weight)


def _activate_and_project(x, bias, weight, kind):
    return linear(activation(x, bias, kind), weight)


class DeepSpeedTransformerLayer(torch.nn.Module):
    """One layer: attention and a feed-forward network of GELU, each with a residual and a norm.

    Args:
        config: a ``DeepSpeedTransformerConfig``, which is copied.
        initial_weights, initial_biases: 8 tensors each, of queries, keys, values, the output of attention, its norm
            (``attn_nw``), the intermediate and the output product, and the other norm (``norm_w``); None: the initial
            values of ``init_transformer_weights``.
        sparsity_config: a ``SparsityConfig``: attention is over its blocks alone.

    Parameters (h: hidden size, i: intermediate size): attn_qkvw [3h, h], attn_qkvb [3h], attn_ow [h, h], attn_ob [h];
    inter_w [i, h], inter_b [i], output_w [h, i], output_b [h]; attn_nw, attn_nb [h], the norm behind attention;
    norm_w, norm_b [h], the norm before attention (``pre_layer_norm``), else the last one.
    """

    layer_id = 0  # layers made so far

    def __init__(self, config, initial_weights=None, initial_biases=None, sparsity_config=None):
        super().__init__()
        config.check()
        if sparsity_config is not None and sparsity_config.num_heads != config.heads:
            raise ValueError(
                f"sparsity_config has {sparsity_config.num_heads} heads and the configuration of the layer "
                f"{config.heads}: give both the same number"
            )
        self.config = copy.copy(config)
        self.config.layer_id = DeepSpeedTransformerLayer.layer_id
        DeepSpeedTransformerLayer.layer_id += 1
        self._number, config.layers_made = config.layers_made, config.layers_made + 1
        self.sparsity_config = sparsity_config
        self._make_parameters()
        if (initial_weights is None) != (initial_biases is None):
            raise ValueError("initial_weights and initial_biases are given together, or neither of them")
        if initial_weights is None:
            self.init_transformer_weights(config.adjust_init_range)
        else:
            self._take(initial_weights, initial_biases)
        self.train(bool(config.training))

    def _make_parameters(self, device=None):
        hidden, wide = self.config.hidden_size, self.config.intermediate_size
        sizes = {
            "attn_qkvw": (3 * hidden, hidden), "attn_qkvb": (3 * hidden,), "attn_ow": (hidden, hidden),
            "attn_ob": (hidden,), "attn_nw": (hidden,), "attn_nb": (hidden,), "inter_w": (wide, hidden),
            "inter_b": (wide,), "output_w": (hidden, wide), "output_b": (hidden,), "norm_w": (hidden,),
            "norm_b": (hidden,),
        }  # fmt: skip
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Parameter(torch.empty(size, device=device)))

    # ---- values ------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def init_transformer_weights(self, adjust_init_range=False):
        """Normal weights, no biases, norms of 1. ``adjust_init_range``: weights onto the residual are divided by
        sqrt(2 * num_hidden_layers). With ``config.seed`` the values depend on it and on the number of the layer among
        those made from one configuration, so all ranks have the same ones."""
        deviation = self.config.initializer_range if self.config.initializer_range > 0 else 0.02
        layers = self.config.num_hidden_layers
        onto_residual = deviation / (2.0 * layers) ** 0.5 if adjust_init_range and layers > 0 else deviation
        generator = None
        if self.config.seed >= 0:
            generator = torch.Generator().manual_seed((self.config.seed << 20) + self._number)
        for name, param in self.named_parameters():
            if name.endswith("b"):
                param.zero_()
            elif name in ("attn_nw", "norm_w"):
                param.fill_(1.0)
            elif not param.is_meta:
                size = onto_residual if name in ("attn_ow", "output_w") else deviation
                values = torch.empty(param.shape, device="cpu", dtype=torch.float32)
                param.copy_(values.normal_(0.0, size, generator=generator))

    @torch.no_grad()
    def _take(self, weights, biases):
        if len(weights) != 8 or len(biases) != 8:
            raise ValueError(
                f"initial_weights and initial_biases have {len(weights)} and {len(biases)} tensors: each has 8"
            )
        values = {
            "attn_qkvw": torch.cat([one.detach() for one in weights[:3]]), "attn_ow": weights[3],
            "attn_nw": weights[4], "inter_w": weights[5], "output_w": weights[6], "norm_w": weights[7],
            "attn_ob": biases[3], "attn_nb": biases[4], "inter_b": biases[5], "output_b": biases[6],
            "norm_b": biases[7],
        }  # fmt: skip
        if all(one is not None for one in biases[:3]):
            values["attn_qkvb"] = torch.cat([one.detach() for one in biases[:3]])
        else:
            self.attn_qkvb.zero_()
        for name, value in values.items():
            param = getattr(self, name)
            if param.shape != value.shape:
                raise ValueError(
                    f"the initial value of {name} has the shape {tuple(value.shape)}, and the parameter "
                    f"{tuple(param.shape)}"
                )
            param.copy_(value)

    @classmethod
    def from_layer(cls, layer, config=None, sparsity_config=None):
        """A layer that computes what ``layer`` computes: a BertLayer (or RobertaLayer) of transformers, or a
        ``torch.nn.TransformerEncoderLayer`` with ``batch_first=True``.

        ``config``: gives the memory flags, dropout and the largest batch; its sizes, norms and activation are those of
        ``layer`` (ValueError if it names others). None: all of it is as in ``layer``. The result has the dtype, device
        and mode of ``layer``.
        """
        found = convert.reader_of(layer)
        made = cls(found.configured(config), sparsity_config=sparsity_config)
        first = next(layer.parameters())
        made.to(device=first.device, dtype=first.dtype).train(layer.training)
        with torch.no_grad():
            for name, value in found.values().items():
                getattr(made, name).copy_(value)
        return made

    def to_layer(self, layer):
        """Copies this layer's values into ``layer``, of a class that ``from_layer`` takes and of the same sizes, and
        returns it."""
        found = convert.reader_of(layer)
        found.compare(self.config, ("hidden_size", "heads", "intermediate_size", "pre_layer_norm", "activation"))
        with torch.no_grad():
            found.fill({name: param.detach() for name, param in self.named_parameters()})
        return layer

    @property
    def self_attn(self):
        """An attribute that ``torch.nn.TransformerEncoder`` reads of its first layer."""
        return SimpleNamespace(batch_first=True)

    # ---- the layer ---------------------------------------------------------------------------------------------------
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        head_mask=None,
        layer_head_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        past_key_value=None,
        output_attentions=False,
        grads=None,
        src_mask=None,
        src_key_padding_mask=None,
        **more,
    ):
        """``[batch, tokens, hidden_size]`` to the same shape, in a tuple with ``config.return_tuple``.

        Args:
            attention_mask: added to scores (floating), or True where a key is seen (bool and whole numbers):
                ``[batch, tokens]``, ``[batch, 1, 1, tokens]`` or ``[batch, 1 or heads, tokens, tokens]``, where batch
                may be 1.
            grads: a list; in backward it gets ``[gradient, name]`` of each parameter, for tests.
            src_mask, src_key_padding_mask: as ``torch.nn.TransformerEncoderLayer`` takes them, where True hides a key.

        ValueError for masks of heads, encoders and caches, which the layer does not have, for more than
        ``config.batch_size`` sequences and more than ``config.max_seq_length`` tokens.
        """
        given = dict(
            more, head_mask=head_mask, layer_head_mask=layer_head_mask, encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask, past_key_value=past_key_value,
        )  # fmt: skip
        self._check(hidden_states, given, output_attentions)
        masks = self._masks(hidden_states, attention_mask, src_mask, src_key_padding_mask)
        if grads is not None:
            self._record(grads)
        device = hidden_states.device.type
        dtype = autocast_dtype(device) or self.attn_qkvw.dtype
        params = SimpleNamespace(**{name: param.to(dtype) for name, param in self.named_parameters()})
        with without_autocast(device):
            out = self._compute(hidden_states.to(dtype), params, masks).to(hidden_states.dtype)
        return (out,) if self.config.return_tuple else out

    def _compute(self, x, p, masks):
        config, dropout = self.config, self._dropout
        before = norm(x, p.norm_w, p.norm_b, **self._norm(p.norm_w)) if config.pre_layer_norm else x
        projected = self._attention(linear(before, p.attn_qkvw, p.attn_qkvb), p.attn_ow, masks)
        total, middle = dropout_add_norm(
            projected, p.attn_ob, x, p.attn_nw, p.attn_nb, dropout(), **self._norm(p.attn_nw)
        )
        out = self._feed_forward(middle, p)
        if config.pre_layer_norm:
            return dropout_add(out, p.output_b, total, dropout())
        return dropout_add_norm(out, p.output_b, middle, p.norm_w, p.norm_b, dropout(), **self._norm(p.norm_w))[1]

    def _attention(self, qkv, weight, masks):
        heads, share = self.config.heads, self.config.share("attn_dropout_ratio") if self.training else 0.0
        dropped = Dropped.drawn(share)
        if self.config.attn_dropout_checkpoint and torch.is_grad_enabled():
            return again(lambda qkv, weight: _attend_and_project(qkv, weight, heads, masks, dropped), qkv, weight)
        return _attend_and_project(qkv, weight, heads, masks, dropped)

    def _feed_forward(self, x, p):
        inner, kind = linear(x, p.inter_w), self.config.activation
        if self.config.gelu_checkpoint and torch.is_grad_enabled():
            return again(lambda *given: _activate_and_project(*given, kind), inner, p.inter_b, p.output_w)
        return _activate_and_project(inner, p.inter_b, p.output_w, kind)

    def _dropout(self):
        return Dropout.drawn(self.config.share("hidden_dropout_ratio") if self.training else 0.0)

    def _norm(self, weight):
        """The rules of a norm with ``weight``, which is inverted in backward if it is wanted and possible."""
        keep = self.config.normalize_invertible and torch.is_grad_enabled()
        if keep and not weight.is_meta:
            keep = bool(weight.detach().abs().min() >= SMALLEST_WEIGHT)
        return {"eps": self.config.layer_norm_eps, "keep_result": keep}

    def _check(self, hidden_states, given, output_attentions):
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"hidden_states have the shape {tuple(hidden_states.shape)}: they are [batch, tokens, "
                f"{self.config.hidden_size}]"
            )
        batch, tokens, _ = hidden_states.shape
        if 0 <= self.config.batch_size < batch:
            raise ValueError(
                f"a batch of {batch} is larger than batch_size, {self.config.batch_size}: give "
                "DeepSpeedTransformerConfig the largest batch of training and of evaluation"
            )
        if 0 <= self.config.max_seq_length < tokens:
            raise ValueError(
                f"a sequence of {tokens} tokens is longer than max_seq_length, {self.config.max_seq_length}"
            )
        for name, value in given.items():
            if value is not None and name not in _IGNORED:
                known = "has none of it" if name in _REFUSED else "does not know it"
                raise ValueError(f"{name} is given, and DeepSpeedTransformerLayer {known}: leave it out")
        if given.get("is_causal"):
            raise ValueError(
                "is_causal is given, and DeepSpeedTransformerLayer looks both ways: give it an attention_mask"
            )
        if output_attentions:
            raise ValueError("output_attentions: DeepSpeedTransformerLayer does not keep attention probabilities")

    def _masks(self, hidden_states, attention_mask, src_mask, padding):
        """The arguments of ``attention`` for all masks of a call."""
        batch, tokens, _ = hidden_states.shape
        looks, biases = [], []
        if attention_mask is not None:
            mask = attention_mask[:, None, None] if attention_mask.dim() == 2 else attention_mask
            sizes = tuple(mask.shape)
            fits = len(sizes) == 4 and sizes[0] in (1, batch) and sizes[1] in (1, self.config.heads)
            if not fits or sizes[2] not in (1, tokens) or sizes[3] != tokens:
                raise ValueError(
                    f"attention_mask has the shape {tuple(attention_mask.shape)}: for hidden_states of "
                    f"{tuple(hidden_states.shape)} it is [{batch}, {tokens}], [{batch}, 1, 1, {tokens}] or "
                    f"[{batch}, 1 or {self.config.heads}, {tokens}, {tokens}]"
                )
            (biases if mask.is_floating_point() else looks).append(mask if mask.is_floating_point() else mask != 0)
        for mask, shape in ((src_mask, (1, 1, tokens, tokens)), (padding, (batch, 1, 1, tokens))):
            if mask is not None:
                mask = mask.reshape(shape)
                (biases if mask.is_floating_point() else looks).append(mask if mask.is_floating_point() else ~mask)
        masks = {"biases": [one.float() for one in biases]}
        if looks:
            seen = looks[0] if len(looks) == 1 else looks[0] & looks[1]
            if seen.shape[1] > 1:
                masks["biases"].append(torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, float("-inf")))
            else:
                masks["looks"] = seen
        if self.sparsity_config is not None:
            masks["blocks"] = layout_of(self.sparsity_config, tokens)
        return masks

    def _record(self, grads):
        names = {"attn_ow": "O_W", "attn_ob": "O_B", "attn_nw": "N2_W", "attn_nb": "N2_B", "inter_w": "int_W",
                 "inter_b": "int_B", "output_w": "out_W", "output_b": "out_B", "norm_w": "norm_W",
                 "norm_b": "norm_B"}  # fmt: skip
        for name, param in self.named_parameters():
            if name in names:
                param.register_hook(lambda grad, name=names[name]: grads.append([grad, name]))
            else:
                tail = "W" if name.endswith("w") else "B"
                param.register_hook(lambda grad, tail=tail: grads.append([grad.chunk(3)[2], "V_" + tail]))

    # ---- memory ------------------------------------------------------------------------------------------------------
    def saved_bytes(self, batch, tokens, dtype=None):
        """Bytes that backward keeps of one call in training with ``[batch, tokens, hidden_size]``, beside parameters
        and the input of the layer. ``dtype``: None: that of the parameters. Computed on the device ``meta``."""
        twin = copy.copy(self)
        twin._parameters = {}
        twin._make_parameters("meta")
        twin.to(dtype or self.attn_qkvw.dtype).train()
        twin.config = copy.copy(self.config)
        twin.config.batch_size = twin.config.max_seq_length = -1
        x = torch.empty(batch, tokens, self.config.hidden_size, device="meta", dtype=twin.attn_qkvw.dtype)
        apart = {memory_of(one) for one in (x, *twin.parameters())}
        kept = {}

        def pack(tensor):
            if memory_of(tensor) not in apart:
                kept[memory_of(tensor)] = storage_of(tensor).nbytes()
            return tensor

        state = torch.get_rng_state()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = twin.forward(x.requires_grad_())
        torch.set_rng_state(state)
        del out  # until here no storage has taken the place of another
        return sum(kept.values())

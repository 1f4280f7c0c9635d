"""Megatron's transformer with hidden communication: Wang et al., "Domino: Eliminating Communication in LLM Training via
Generic Tensor Slicing and Overlapping" (2024).

The batch is cut into two halves that take turns. While the ranks add up what an attention or a unit gave for one half,
the other half is computed. Backward runs in the opposite order: while the gradient of one half's input is added up, the
backward of the other half is computed.
"""

import functools
import inspect

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.comm.mesh_views import PIPELINE, ask_mpu, tensor_ranks_of
from deepspeed.module_inject import domino_config
from deepspeed.module_inject.domino_config import AttnMaskType, LayerType
from deepspeed.module_inject.domino_layers import MLP, Attention, Norm, Ranks
from deepspeed.module_inject.layers import exchange_of


class DominoModule(nn.Module):
    """A module with the method by which Megatron's models collect what they save."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(self, prefix="", keep_vars=False):
        """``state_dict``."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)


class _Half:
    """Samples on their way through the layers; ``add``: adds the sum that is on its way to them."""

    def __init__(self, hidden, mask, angles):
        self.hidden, self.mask, self.angles, self.sum, self.add = hidden, mask, angles, None, None

    def finish(self):
        """Waits for the sum, if there is one."""
        if self.sum is not None:
            self.hidden = self.add(self.sum.wait())
            self.sum = self.add = None


class DominoTransformerLayer(DominoModule):
    """Attention and unit with their norms. ``number``: of the layer, from 1."""

    def __init__(self, config, settings, ranks, number, masks, rotate, drop_path_rate):
        super().__init__(config)
        self.residual_behind_norm, self.dropout = settings.residual_behind_norm, settings.hidden_dropout
        self.layer_number, self.drop_path_rate = number, drop_path_rate
        self.input_layernorm = Norm(settings)
        self.self_attention = Attention(settings, ranks, number, masks, rotate)
        self.post_attention_layernorm = Norm(settings)
        self.mlp = MLP(settings, ranks)

    def attend(self, half, exchange, place):
        """Starts the sum of the attention of a half; ``place``: of ``TensorExchange.copy_in_beside``."""
        normed = self.input_layernorm(half.hidden)
        part = self.self_attention(exchange.copy_in_beside(normed, place), half.mask, half.angles)
        self._start(half, exchange, part, normed, self.self_attention.dense.bias)

    def transform(self, half, exchange, place):
        """Starts the sum of the unit."""
        normed = self.post_attention_layernorm(half.hidden)
        part = self.mlp(exchange.copy_in_beside(normed, place))
        self._start(half, exchange, part, normed, self.mlp.dense_4h_to_h.bias)

    def _start(self, half, exchange, part, normed, bias):
        before = normed if self.residual_behind_norm else half.hidden
        half.add = functools.partial(self._add, before, bias)
        half.sum = exchange.start_sum(part)

    def _add(self, before, bias, made):
        made = made if bias is None else made + bias.to(made.dtype)
        made = F.dropout(made, self.dropout, self.training)
        if self.drop_path_rate > 0 and self.training:
            made = _drop_path(made, self.drop_path_rate)
        return before + made.to(before.dtype)


def _drop_path(made, rate):
    """Leaves out the samples of (tokens, samples, hidden) with probability ``rate``: Huang et al., "Deep Networks with
    Stochastic Depth" (2016)."""
    kept = torch.rand(1, made.shape[1], 1, device=made.device) >= rate
    return made * (kept / (1 - rate)).to(made.dtype)


class DominoTransformer(DominoModule):
    """The layers of a Megatron model, with tensor-parallel communication behind computation.

    Args:
        config: Megatron's ``TransformerConfig`` or its arguments; ``docs/tutorials/domino.md`` lists what is read.
        mpu: an object with ``get_tensor_model_parallel_{group,rank,world_size}`` or ``get_model_parallel_*``, and with
            ``get_pipeline_model_parallel_{rank,world_size}`` in a pipeline. None: this rank has the whole layers.
        apply_rotary_pos_emb: a function of queries or keys, (tokens, samples, heads, width), of angles and, if it takes
            one, of ``config``. None: positions are not rotary.
        model_type, layer_type, self_attn_mask_type: members of the enumerations of this module or of Megatron's.
        post_layer_norm: whether the last stage ends with a norm.
        pre_process, post_process: whether this is the first and the last stage of a pipeline.
        drop_path_rate: of the last layer; earlier layers have less, in equal steps from 0.

    ValueError for what is not supported, with the fix. Weights are this rank's slices (``ParamCut``).
    """

    def __init__(
        self,
        config,
        mpu,
        apply_rotary_pos_emb,
        model_type,
        layer_type=LayerType.encoder,
        self_attn_mask_type=AttnMaskType.causal,
        post_layer_norm=True,
        pre_process=True,
        post_process=True,
        drop_path_rate=0.0,
    ):
        super().__init__(config)
        kind = domino_config.named(
            "model_type", model_type, ("encoder_or_decoder", "encoder_and_decoder"),
            "layers with retrieval are not here, use ModelType.encoder_or_decoder",
        )  # fmt: skip
        domino_config.named(
            "layer_type", layer_type, ("encoder",),
            "forward() gets no output of an encoder and has no cross attention. Use LayerType.encoder, for "
            "models that only decode, too, with AttnMaskType.causal",
        )  # fmt: skip
        masks = domino_config.named(
            "self_attn_mask_type", self_attn_mask_type, [one.name for one in AttnMaskType],
            f"use one of {', '.join(f'AttnMaskType.{one.name}' for one in AttnMaskType)}",
        )  # fmt: skip
        if not 0 <= drop_path_rate < 1:
            raise ValueError(f"DominoTransformer: drop_path_rate is {drop_path_rate}: use at least 0 and less than 1")
        ranks = Ranks(*tensor_ranks_of(mpu))
        if ranks.size > 1 and ranks.group is None:
            raise ValueError(
                f"DominoTransformer: the mpu has {ranks.size} tensor-parallel ranks and no group of them: add "
                "get_tensor_model_parallel_group() or get_model_parallel_group()"
            )
        stages, stage = (ask_mpu(mpu, what, PIPELINE) for what in ("world_size", "rank"))
        if kind == "encoder_and_decoder" and (stages or 1) > 1:
            raise ValueError(
                f"DominoTransformer: {stages} pipeline stages of an encoder and a decoder are not supported: use "
                "ModelType.encoder_or_decoder, or one stage"
            )
        settings = domino_config.read(config, ranks.size, stages or 1, stage or 0)
        self.hidden, self.fp32_residual = settings.hidden, settings.fp32_residual
        self.pre_process, self.post_process, self.input_tensor = pre_process, post_process, None
        self.rotate, self.exchange = _rotation(apply_rotary_pos_emb, config), exchange_of(ranks.group)
        rates = torch.linspace(0, drop_path_rate, settings.all_layers, device="cpu").tolist()
        self.layers = nn.ModuleList(
            DominoTransformerLayer(config, settings, ranks, number + 1, masks, self.rotate, rates[number])
            for number in range(settings.first, settings.first + settings.layers)
        )
        if post_process and post_layer_norm:
            self.final_layernorm = Norm(settings)

    def set_input_tensor(self, input_tensor):
        """In a pipeline: what the stage before gave, which ``forward`` then uses in place of its ``hidden_states``."""
        self.input_tensor = input_tensor

    def forward(self, hidden_states, attention_mask, rotary_pos_emb=None):
        """``inter_layer_overlap_forward``.

        Args:
            hidden_states: (tokens, samples, hidden), equal on all tensor-parallel ranks. One sample is not divided.
            attention_mask: True where a query does not see a key, (samples or 1, 1, queries, keys), or None. With
                ``AttnMaskType.causal`` later tokens are not seen in any case.
            rotary_pos_emb: the angles for ``apply_rotary_pos_emb``, (tokens, samples or 1, ...), or a pair of them, for
                queries and keys.

        Returns (tokens, samples, hidden), equal on all these ranks.
        """
        return self.inter_layer_overlap_forward(hidden_states, attention_mask, rotary_pos_emb)

    def inter_layer_overlap_forward(self, hidden_states, attention_mask, rotary_pos_emb=None):
        """The last sum of a layer runs beside the beginning of the next layer, too. Arguments as of ``forward``."""
        return self._run(hidden_states, attention_mask, rotary_pos_emb, across_layers=True)

    def intra_layer_overlap_forward(self, hidden_states, attention_mask, rotary_pos_emb=None):
        """Each layer ends before the next one begins: the last sum of a layer is not hidden. Arguments as of
        ``forward``."""
        return self._run(hidden_states, attention_mask, rotary_pos_emb, across_layers=False)

    def _run(self, hidden, mask, angles, across_layers):
        halves, exchange = self._halves(hidden, mask, angles), self.exchange
        before = exchange.place_now()  # of the computation before the next one, which is that of the other half
        for layer in self.layers:
            for start in (layer.attend, layer.transform):
                for half in halves:
                    half.finish()
                    here = exchange.place_now()
                    start(half, exchange, before)
                    before = here
            if not across_layers:
                for half in halves:
                    half.finish()
                before = exchange.place_now()
        made = []
        for half in halves:
            half.finish()
            made.append(self.final_layernorm(half.hidden) if hasattr(self, "final_layernorm") else half.hidden)
        return torch.cat(made, 1) if len(made) > 1 else made[0]

    def _halves(self, hidden, mask, angles):
        if not self.pre_process and self.input_tensor is not None:
            hidden = self.input_tensor
        if hidden is None or hidden.dim() != 3 or hidden.shape[2] != self.hidden:
            shape = None if hidden is None else list(hidden.shape)
            raise ValueError(f"hidden_states has shape {shape}, and [tokens, samples, {self.hidden}] is needed")
        if angles is not None and self.rotate is None:
            raise ValueError("rotary_pos_emb needs apply_rotary_pos_emb: pass that function to DominoTransformer")
        samples = hidden.shape[1]
        if mask is not None:
            _check_mask(mask, samples)
        hidden = hidden.float() if self.fp32_residual else hidden
        if samples < 2:
            return [_Half(hidden, mask, angles)]
        masks = _split(mask, 0, samples)
        if isinstance(angles, (tuple, list)):
            pairs = zip(*(_split(one, 1, samples) for one in angles))
        else:
            pairs = _split(angles, 1, samples)
        return [_Half(*one) for one in zip(hidden.tensor_split(2, 1), masks, pairs)]


def _check_mask(mask, samples):
    if mask.is_floating_point() or mask.dim() != 4 or mask.shape[0] not in (1, samples):
        raise ValueError(
            f"attention_mask has the type {mask.dtype} and the shape {list(mask.shape)}: pass Megatron's, booleans "
            f"that are True where a query does not see a key, of shape [{samples} or 1, 1, queries, keys], or None"
        )


def _split(tensor, dim, samples):
    """The halves of a tensor that has something for each sample; twice the tensor where it has not."""
    if tensor is None or tensor.dim() <= dim or tensor.shape[dim] != samples:
        return tensor, tensor
    return tensor.tensor_split(2, dim)


def _rotation(function, config):
    """``function``, which may take ``config`` as well, as a function of a tensor and angles."""
    if function is None:
        return None
    try:
        takes = "config" in inspect.signature(function).parameters
    except ValueError:  # a function of C
        takes = False
    return functools.partial(function, config=config) if takes else function

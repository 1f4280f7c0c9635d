"""The layers of ``DominoTransformer``, under Megatron's names. Tensors between them are (tokens, samples, hidden), and
whole on every rank; attention and unit give this rank's part of a sum, which the transformer adds up over the ranks."""

import contextlib
import dataclasses
import types

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed._native import _C
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.utils.random_state import MODEL_PARALLEL, OwnRandomNumbers, get_cuda_rng_tracker


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that share each layer: torch's group (None: this rank alone), their number, and this rank's place."""

    group: object
    size: int
    rank: int

    def cut(self, *sizes):
        """The native ``TensorCut`` of sub-parameters side by side, of which every rank has an equal run."""
        shares = [size // self.size for size in sizes]
        runs = [[(share * rank, share * (rank + 1)) for rank in range(self.size)] for share in shares]
        return _C.TensorCut(list(sizes), runs)


class _Cut(TensorParallel_Layer):
    """A linear layer without its exchange. The whole weight is drawn on every rank and then cut, so that the joined
    weights do not depend on the number of ranks if all ranks of a group draw the same numbers."""

    def __init__(self, inputs, outputs, cut, bias, init, settings, ranks):
        weight = torch.empty(outputs, inputs)
        if init is not None:
            init(weight)
        whole = types.SimpleNamespace(
            weight=nn.Parameter(weight.to(settings.dtype)),
            bias=nn.Parameter(torch.zeros(outputs, dtype=settings.dtype)) if bias else None,
            training=True,
        )
        super().__init__(whole, ranks.group, cut=cut)


class ColumnLinear(_Cut):
    """Gives this rank's channels of an input that all ranks have alike."""

    def forward(self, x):
        """x: (..., inputs); result: (..., this rank's outputs)."""
        return self._own(x, self.bias)


class RowLinear(_Cut):
    """Reads this rank's channels and gives its part of a sum, without the bias, which is added to the sum."""

    along_outputs = False

    def forward(self, x):
        """x: (..., this rank's inputs); result: (..., outputs)."""
        return self._own(x, None)


class Norm(nn.Module):
    """``LayerNorm`` or ``RMSNorm``; its result has the type of its weight."""

    def __init__(self, settings):
        super().__init__()
        self.kind, self.epsilon = settings.normalization, settings.epsilon
        self.weight = nn.Parameter(torch.ones(settings.hidden, dtype=settings.dtype))
        if self.kind == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(settings.hidden, dtype=settings.dtype))

    def forward(self, x):
        """x: (..., hidden)."""
        if self.kind == "LayerNorm":
            made = F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.epsilon)
            return made.to(self.weight.dtype)
        wide = x.float()
        made = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return made.to(self.weight.dtype) * self.weight


class Attention(nn.Module):
    """Heads of this rank. ``number``: of the layer, from 1. ``masks``: the name of an ``AttnMaskType``. ``rotate``: a
    function of queries or keys, (tokens, samples, heads, width), and angles; None: positions are not rotary."""

    def __init__(self, settings, ranks, number, masks, rotate):
        super().__init__()
        self.heads, self.shared_heads = settings.heads // ranks.size, settings.shared_heads // ranks.size
        self.head_dim, self.dropout, self.softmax_in_fp32 = (
            settings.head_dim, settings.attention_dropout, settings.softmax_in_fp32,
        )  # fmt: skip
        self.divisor = number if settings.scales_by_layer else 1
        self.causal, self.rotate, self.alone = "causal" in masks, rotate, ranks.size == 1
        self.own_numbers = OwnRandomNumbers(ranks.rank)
        width = settings.heads * settings.head_dim
        fused = width + 2 * settings.shared_heads * settings.head_dim
        self.query_key_value = ColumnLinear(
            settings.hidden, fused, ranks.cut(fused), settings.attention_bias, settings.init, settings, ranks
        )
        self.dense = RowLinear(
            width, settings.hidden, ranks.cut(width), settings.bias, settings.output_init, settings, ranks
        )

    def forward(self, x, mask=None, angles=None):
        """x: (tokens, samples, hidden). mask: True where a query does not see a key, (samples or 1, 1, queries, keys).
        Result: this rank's part of (tokens, samples, hidden)."""
        tokens, samples, _ = x.shape
        readers = self.heads // self.shared_heads
        fused = self.query_key_value(x).view(tokens, samples, self.shared_heads, -1)
        query, key, value = fused.split([readers * self.head_dim, self.head_dim, self.head_dim], -1)
        query = query.reshape(tokens, samples, self.heads, self.head_dim)
        if angles is not None:
            of_query, of_key = angles if isinstance(angles, (tuple, list)) else (angles, angles)
            query, key = self.rotate(query, of_query).to(value.dtype), self.rotate(key, of_key).to(value.dtype)
        query, key, value = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        if readers > 1:
            key, value = (one.repeat_interleave(readers, 1) for one in (key, value))
        made = self._attend(query, key, value, mask)
        return self.dense(made.permute(2, 0, 1, 3).reshape(tokens, samples, -1))

    def _attend(self, query, key, value, mask):
        """All of them (samples, heads, tokens, width)."""
        dropout = self.dropout if self.training else 0.0
        fused = getattr(F, "scaled_dot_product_attention", None)
        with self._numbers() if dropout else contextlib.nullcontext():
            if fused is not None and mask is None:
                return fused(query, key, value, dropout_p=dropout, is_causal=self.causal)
            scores = torch.matmul(query * (self.head_dim**-0.5 / self.divisor), key.transpose(-1, -2))
            if self.causal:
                later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
                mask = later if mask is None else mask | later
            scores, kind = scores.float() if self.softmax_in_fp32 else scores, scores.dtype
            scores = scores * self.divisor if self.divisor > 1 else scores
            scores = scores if mask is None else scores.masked_fill(mask, -10000.0)
            return torch.matmul(F.dropout(scores.softmax(-1).to(kind), dropout), value)

    @contextlib.contextmanager
    def _numbers(self):
        """Random numbers of this rank's own: its heads are not those of other ranks. They come from the tracker where a
        script has seeded it, else from a seed that differs between ranks."""
        tracker = get_cuda_rng_tracker()
        if MODEL_PARALLEL in tracker.get_states():
            with tracker.fork():
                yield
        elif self.alone:
            yield
        else:
            self.own_numbers.begin(self, None, None)
            try:
                yield
            finally:
                self.own_numbers.end(self, None)


class MLP(nn.Module):
    """The unit of a layer: this rank's inner channels."""

    def __init__(self, settings, ranks):
        super().__init__()
        self.gated, self.activation = settings.gated, settings.activation
        hidden, inner = settings.hidden, settings.inner
        up = ranks.cut(*[inner] * (1 + self.gated))
        self.dense_h_to_4h = ColumnLinear(hidden, up.size(), up, settings.bias, settings.init, settings, ranks)
        self.dense_4h_to_h = RowLinear(
            inner, hidden, ranks.cut(inner), settings.bias, settings.output_init, settings, ranks
        )

    def forward(self, x):
        """x: (..., hidden); result: this rank's part of (..., hidden)."""
        made = self.dense_h_to_4h(x)
        if not self.gated:
            return self.dense_4h_to_h(self.activation(made))
        gate, values = made.chunk(2, -1)
        return self.dense_4h_to_h(self.activation(gate) * values)

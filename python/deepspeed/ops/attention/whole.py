"""Attention of whole sequences with masks, layouts of blocks, biases and dropout: autograd over the kernels of
csrc/kernels/attention.h. No scores are kept for backward, which computes them again, tile by tile."""

from typing import NamedTuple

import torch

from deepspeed._native import _C, tell_modes
from deepspeed.ops.attention.blocks import Dropped
from deepspeed.ops.attention.body import body_for, ops

MOST_BIASES = 2


class KeyBlocks:
    """The blocks of keys that each block of queries sees: ``layout[head, block of queries, block of keys]`` is not 0.

    ``layout``: a tensor of whole numbers or bool; ``size``: tokens of a block, the last one of a sequence may have
    fewer. Heads that are all alike may be one.
    """

    def __init__(self, layout, size):
        self.layout, self.size = layout.detach().ne(0).cpu(), int(size)
        self._lists = _C.KeyBlocks(self.layout, self.size)
        self._there = {}

    @property
    def density(self):
        """The share of all pairs of blocks that are seen."""
        lists = self._lists
        return lists.pairs / (lists.heads * lists.rows * lists.columns)

    def on(self, device):
        """For the kernels, on ``device``."""
        if device not in self._there:
            self._there[device] = self._lists.to(device)
        return self._there[device]

    def check(self, heads, queries, keys):
        """ValueError with both numbers if the layout is of other heads or lengths."""
        given = tuple(self.layout.shape)
        blocks = [-(-tokens // self.size) for tokens in (queries, keys)]
        if given[0] not in (1, heads):
            raise ValueError(f"the layout has {given[0]} heads and the queries {heads}")
        if list(given[1:]) != blocks:
            raise ValueError(
                f"the layout has {given[1]} x {given[2]} blocks of {self.size} tokens, but {queries} queries and "
                f"{keys} keys are {blocks[0]} x {blocks[1]} blocks"
            )

    def mask(self, queries, keys, device):
        """Where queries look, bool ``[heads or 1, queries, keys]``."""
        whole = self.layout.to(device)
        for dim, tokens in ((1, queries), (2, keys)):
            whole = whole.repeat_interleave(self.size, dim).narrow(dim, 0, tokens)
        return whole


class Rules(NamedTuple):
    """The rules of a call, but for the biases, which may have gradients. ``inner``: the second dimension of biases."""

    scale: float
    soft_cap: float
    causal: bool
    window: int
    looks: torch.Tensor | None
    blocks: KeyBlocks | None
    dropped: Dropped | None
    inner: int

    def native(self, device, biases):
        return _C.BlockRules(
            self.scale,
            self.causal,
            window=self.window,
            looks=self.looks,
            soft_cap=self.soft_cap,
            dropout=self.dropped and self.dropped.at((0, 0)),
            blocks=self.blocks and self.blocks.on(device),
            biases=[bias for bias in biases if bias is not None],
            inner=self.inner,
        )

    def share(self):
        return 1.0 if self.blocks is None else self.blocks.density


class KernelAttention(torch.autograd.Function):
    """``apply(query, key, value, first bias or None, second bias or None, rules)``, with four dimensions, biases with
    five."""

    @staticmethod
    def forward(ctx, query, key, value, first, second, rules):
        given, sizes = (first, second), query.shape[:3]
        wide = torch.promote_types(query.dtype, torch.float32)
        high, total = (query.new_empty(sizes, dtype=wide) for _ in range(2))
        output = query.new_empty(*sizes, value.shape[-1], dtype=wide)
        if not query.is_meta:
            how = rules.native(query.device, given)
            ops().forward([query, key, value], [high, total, output], True, how)
        tell_modes("block_attention", output, query, key, value, rules.share())
        output = _divided(output, total.clamp(min=torch.finfo(wide).tiny).unsqueeze(-1), query)
        lse = high.add_(total.log_())  # -inf for a query that has seen nothing
        ctx.save_for_backward(query, key, value, *given, output, lse)
        ctx.rules = rules
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, *given, output, lse = ctx.saved_tensors
        rules, inputs = ctx.rules, [query, key, value, grad]
        row_sum = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
        found = [query.new_empty(one.shape, dtype=lse.dtype) for one in (query, key, value)]
        how = None if query.is_meta else rules.native(query.device, given)
        if how is not None:
            ops().backward(inputs, [lse, row_sum], found, how)
        tell_modes("block_attention_backward", found, grad, query, key, value, rules.share())
        grads, number = [found.pop(0).to(one.dtype) for one in (query, key, value)], 0
        for bias, wanted in zip(given, ctx.needs_input_grad[3:]):
            one = bias.new_empty(bias.shape, dtype=lse.dtype) if wanted else None
            if wanted and how is not None:
                ops().bias_backward(inputs, [lse, row_sum], number, one, how)
            if wanted:
                tell_modes("block_attention_bias", one, grad, query, key, value, rules.share())
            grads.append(one.to(bias.dtype) if wanted else None)
            number += bias is not None  # of those that there are
        return (*grads, None)


def _divided(sums, total, query):
    """``sums / total`` in the dtype of ``query``, and in its layout: heads next to each other for each token, where
    queries lie so, which is what the product behind attention reads."""
    by_token = query.stride(1) < query.stride(2) and query.shape[1] > 1
    if not by_token:
        return sums.div_(total).to(query.dtype)
    batch, heads, tokens, size = sums.shape
    out = sums.new_empty(batch, tokens, heads, size, dtype=query.dtype).transpose(1, 2)
    return torch.div(sums, total, out=out)


def seen_keys(query, key, rules):
    """Where queries look, bool, to be broadcast to ``[batch, heads, queries, keys]``; None: everywhere."""
    queries, keys, device = query.shape[2], key.shape[2], query.device
    found = [] if rules.looks is None else [rules.looks]
    ahead = torch.arange(keys, device=device) - torch.arange(queries, device=device).unsqueeze(1)
    if rules.causal:
        found.append(ahead <= 0)
    if rules.window:
        found.append(ahead > -rules.window)
    if rules.blocks is not None:
        found.append(rules.blocks.mask(queries, keys, device))
    whole = None
    for one in found:
        whole = one if whole is None else whole & one
    return whole


def formula(query, key, value, biases, rules):
    """Attention in torch's operations, which keep all scores. Computes in fp32 or wider."""
    wide, heads = torch.promote_types(query.dtype, torch.float32), query.shape[1]
    repeats = heads // key.shape[1]
    key, value = (one.repeat_interleave(repeats, 1).to(wide) for one in (key, value))
    scores = torch.matmul(query.to(wide), key.transpose(-1, -2)) * rules.scale
    if rules.soft_cap:
        scores = torch.tanh(scores / rules.soft_cap) * rules.soft_cap
    for bias in biases:
        scores = scores + bias.expand(query.shape[0] // rules.inner, rules.inner, -1, -1, -1).flatten(0, 1).to(wide)
    seen = seen_keys(query, key, rules)
    some = scores > float("-inf") if seen is None else (scores > float("-inf")) & seen
    used = scores.masked_fill(~some, torch.finfo(wide).min).softmax(-1) * some
    if rules.dropped is not None:
        used = used * rules.dropped.mask(used.unsqueeze(2), (0, 0)).squeeze(2)
    return torch.matmul(used, value).to(query.dtype)


def _five(bias, sizes, number):
    """``bias`` as ``[outer, inner, heads, queries, keys]``, each of them 1 or as in ``sizes``."""
    whole = bias.unsqueeze(0) if bias.dim() == 4 and sizes[0] == 1 else bias
    if whole.dim() != 5 or any(own not in (1, size) for own, size in zip(whole.shape, sizes)):
        expected = sizes if sizes[0] > 1 or bias.dim() == 5 else sizes[1:]
        raise ValueError(
            f"bias {number} has the shape {tuple(bias.shape)}: it is {expected}, or 1 in any of them "
            "([..., heads, queries, keys])"
        )
    return whole


def attention(
    query,
    key,
    value,
    biases=(),
    blocks=None,
    causal=False,
    window=0,
    looks=None,
    scale=None,
    soft_cap=0.0,
    dropped=None,
):
    """``softmax(query key^T * scale + biases) value`` over the keys that each query may see.

    Args:
        query, key, value: ``[batch, heads, tokens, size]`` or ``[outer, inner, heads, tokens, size]``; key/value heads
            may be fewer, and are read by equal runs of query heads. fp32, bf16, fp16 or fp64; scores are computed in
            fp32 or wider.
        biases: up to two tensors ``[(outer,) batch or inner, heads, queries, keys]``, where any of these may be 1; of
            the dtype of ``query``, or fp32. They have gradients.
        blocks: ``KeyBlocks``. causal: query i sees keys up to i. window: and the last ``window`` of them alone.
        looks: bool ``[batch or 1, 1, queries or 1, keys]`` where queries may look.
        scale: None: 1 / sqrt(size). soft_cap: scores are ``soft_cap * tanh(score / soft_cap)`` before biases.
        dropped: ``Dropped``, of the probabilities.

    Returns a tensor like ``query`` with the last dimension of ``value``. A query that sees no key gets zeros. Sources:
    Dao, "FlashAttention-2" (2023); for layouts of blocks Child et al., "Sparse Transformers" (2019).
    """
    outer = query.shape[:-4]
    if query.dim() not in (4, 5) or key.dim() != query.dim() or value.dim() != query.dim():
        shapes = ", ".join(str(tuple(one.shape)) for one in (query, key, value))
        raise ValueError(
            f"query, key and value have the shapes {shapes}: they are [batch, heads, tokens, size], or [outer, inner, "
            "heads, tokens, size]"
        )
    if len(biases) > MOST_BIASES:
        raise ValueError(f"attention takes at most {MOST_BIASES} biases, got {len(biases)}")
    inner, heads, queries, keys = query.shape[-4], query.shape[-3], query.shape[-2], key.shape[-2]
    sizes = (*(outer or (1,)), inner, heads, queries, keys)
    biases = [_five(bias, sizes, number + 1) for number, bias in enumerate(biases)]
    if blocks is not None:
        blocks.check(heads, queries, keys)
    if outer:
        query, key, value = (one.flatten(0, 1) for one in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    rules = Rules(scale, float(soft_cap), causal, window, looks, blocks, dropped, inner)
    plain = not biases and not soft_cap and not window and blocks is looks is dropped is None
    body = body_for(query, plain)
    if body == "kernel":
        found = KernelAttention.apply(query, key, value, *biases, *[None] * (MOST_BIASES - len(biases)), rules)
    elif body == "fused":
        more = {"is_causal": causal, "scale": scale}
        if key.shape[1] != heads:
            key, value = (one.repeat_interleave(heads // key.shape[1], 1) for one in (key, value))
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, **more)
    else:
        found = formula(query, key, value, biases, rules)
    return found.unflatten(0, (outer[0], inner)) if outer else found

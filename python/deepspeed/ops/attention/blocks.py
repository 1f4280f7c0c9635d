"""Attention block by block, with the running maximum and sum of each row of scores: memory holds one block of scores at
a time.

Tensors are ``[batch, heads, tokens, size]``; key/value heads may be fewer, and are then used by equal runs of query
heads. Source: Dao, "FlashAttention-2" (2023), algorithms 1 and 2. On the CPU the kernels of csrc/kernels/attention.h
compute it, by tiles; elsewhere and in fp64 torch does, a block of scores at a time.
"""

from typing import NamedTuple

import torch

from deepspeed._native import _C, tell_modes
from deepspeed.ops.attention.body import on_host, ops

_WORD = (1 << 32) - 1


class Dropped:
    """Dropout of probabilities. ``seed`` and the numbers of batch, head, query and key in the whole decide which ones
    are dropped, so they are the same for every cut into blocks, and in backward ([Note: dropout] in
    csrc/kernels/philox.h). ``head``: the number of this rank's first head."""

    def __init__(self, probability, seed, head=0):
        if not 0 <= probability < 1:
            raise ValueError(f"dropout is {probability}: of attention it is 0 or more, and less than 1")
        self.probability, self.seed, self.head = probability, seed, head

    @classmethod
    def drawn(cls, probability):
        """Dropout with a seed from torch's generator on the CPU, so that ranks with equal states of it drop the same
        probabilities as one process. None if nothing is dropped."""
        return cls(probability, int(torch.randint(1 << 62, ()))) if probability else None

    def of_heads(self, first):
        """For heads from number ``first`` of these on."""
        return Dropped(self.probability, self.seed, self.head + first)

    def at(self, position):
        """For the kernels, of a block whose first query and key are ``position``."""
        return _C.BlockDropout(self.probability, self.seed, self.head, *position)

    def mask(self, like, position):
        """The factors of a block's probabilities ``[batch, kv heads, readers, queries, keys]``."""
        batch, kv, readers, queries, keys = like.shape

        def numbers(start, stop, *shape):
            return torch.arange(start, stop, device=like.device).view(*shape)

        first, last = position[1] // 4, (position[1] + keys - 1) // 4 + 1
        counter = (
            numbers(position[0], position[0] + queries, -1, 1),
            numbers(first, last, 1, -1),
            numbers(self.head, self.head + kv * readers, 1, -1, 1, 1),
            numbers(0, batch, -1, 1, 1, 1),
        )
        words = torch.stack(torch.broadcast_tensors(*philox(counter, self.seed)), -1).flatten(-2)
        words = words[..., position[1] % 4 :][..., :keys].view(like.shape)
        return (words >= int(self.probability * (1 << 32))).to(like.dtype) * (1 / (1 - self.probability))


def philox(counter, seed):
    """Four words of random bits; all numbers are of 32 bits, in int64, whose products wrap around."""
    a, b, c, d = counter
    low, high = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (second >> 32 & _WORD) ^ b ^ low, second & _WORD
        c, d = (first >> 32 & _WORD) ^ d ^ high, first & _WORD
        low, high = low + 0x9E3779B9 & _WORD, high + 0xBB67AE85 & _WORD
    return a, b, c, d


class ScoreRules(NamedTuple):
    """The rules for scores: products times ``scale``, then ``soft_cap * tanh(score / soft_cap)`` if it is not 0.
    ``sinks``: a score of each query head that takes part in its rows' sums of exponentials, and has no value.
    ``dropped``: of the probabilities."""

    scale: float
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    dropped: Dropped | None = None

    @classmethod
    def checked(cls, query, scale, soft_cap, sinks, dropped):
        """``scale`` None: 1 / sqrt(size of a head)."""
        if not 0 <= soft_cap < float("inf"):
            raise ValueError(f"soft_cap is {soft_cap}: scores are capped by a positive number, or by none (0)")
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise ValueError(
                f"sinks have the shape {tuple(sinks.shape)}: {query.shape[1]} heads need one for each head"
            )
        return cls(query.shape[-1] ** -0.5 if scale is None else scale, float(soft_cap), sinks, dropped)

    def of_block(self, causal, looks, position):
        """For the kernels."""
        dropout = self.dropped and self.dropped.at(position)
        return _C.BlockRules(self.scale, causal, looks=looks, soft_cap=self.soft_cap, dropout=dropout)

    def mask(self, like, position):
        return None if self.dropped is None else self.dropped.mask(like, position)


def sink_gradient(sinks, lse, row_sum):
    """The gradient of the sinks from some rows, ``[heads]``: outputs shrink as the sink grows."""
    return -((sinks.detach().to(lse.dtype).view(1, -1, 1, 1) - lse).exp() * row_sum).sum((0, 2, 3))


def _grouped(query, heads):
    """``[batch, key/value heads, readers, tokens, size]``."""
    return query.unflatten(1, (heads, query.shape[1] // heads))


def _scores(query, key, rules, causal, looks=None):
    """fp32 or wider, ``[batch, kv heads, readers, queries, keys]``; ``causal``: the block is on the diagonal;
    ``looks``: ``[batch, 1, queries, keys]``, where a query may look."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query.to(wide), key.to(wide).transpose(-1, -2).unsqueeze(2)) * rules.scale
    if rules.soft_cap:
        scores = (scores / rules.soft_cap).tanh_() * rules.soft_cap
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores if looks is None else scores.masked_fill(~looks.unsqueeze(2), float("-inf"))


class Rows:
    """Some queries, with the running results over the keys that they have seen."""

    def __init__(self, query, kv_heads, rules):
        self.query, self.kv_heads, self.rules = query, kv_heads, rules
        self.high = self.total = self.sum = None

    def see(self, key, value, causal=False, position=(0, 0), looks=None):
        """``position``: of the first query and key in the whole sequence."""
        if self.high is None and self.rules.sinks is not None:
            self._begin_with_sinks(value.shape[-1])
        if on_host(self.query):
            self._see_by_kernel(key, value, causal, position, looks)
            return
        query = _grouped(self.query, self.kv_heads)
        scores = _scores(query, key, self.rules, causal, looks)
        high = scores.amax(-1, keepdim=True)
        if looks is not None:  # a query may see none of the block
            high = high.clamp_(min=torch.finfo(high.dtype).min)
        high = high if self.high is None else torch.maximum(high, self.high)
        scores = (scores - high).exp_()
        total, mask = scores.sum(-1, keepdim=True), self.rules.mask(scores, position)
        seen = torch.matmul(scores if mask is None else scores * mask, value.to(scores.dtype).unsqueeze(2))
        if self.high is not None:
            shrink = (self.high - high).exp_()
            total, seen = total + self.total * shrink, seen + self.sum * shrink
        self.high, self.total, self.sum = high, total, seen

    def _begin_with_sinks(self, size):
        wide, shape = torch.promote_types(self.query.dtype, torch.float32), self._shape()
        sinks = self.rules.sinks.detach().to(wide).view(1, *shape[1:3], 1, 1)
        self.high = sinks.expand(*shape, 1).clone(memory_format=torch.contiguous_format)  # kernels write there
        self.total, self.sum = torch.ones_like(self.high), self.high.new_zeros(*shape, size)

    def _shape(self):
        batch, heads, tokens, _ = self.query.shape
        return batch, self.kv_heads, heads // self.kv_heads, tokens

    def _see_by_kernel(self, key, value, causal, position, looks):
        fresh, query = self.high is None, self.query
        if fresh:
            made = [query.new_empty(*self._shape(), size, dtype=torch.float32) for size in (1, 1, value.shape[-1])]
            self.high, self.total, self.sum = made
        if not query.is_meta:
            state = [self.high, self.total, self.sum]
            rules = self.rules.of_block(causal, looks, position)
            ops().forward([query, key, value], state, fresh, rules)
        tell_modes("attention", self.sum, query, key, value)

    def result(self):
        """``(output, log of the sum of exponentials of each row)``; zeros for a query that has seen nothing."""
        self.total = self.total.clamp(min=torch.finfo(self.total.dtype).tiny)
        output = (self.sum / self.total).to(self.query.dtype).flatten(1, 2)
        lowest = torch.finfo(self.high.dtype).min
        return output, (self.high.clamp(min=lowest) + self.total.log()).flatten(1, 2)


def block_gradients(query, key, value, grad, row_sum, lse, rules, causal, position=(0, 0), looks=None):
    """Gradients of one block: ``(queries', keys', values')`` gradients, fp32 or wider. ``grad``: of the output;
    ``row_sum``: the sum over features of output times ``grad``; ``lse``: what ``Rows.result`` has returned;
    ``position``: as in ``Rows.see``."""
    if on_host(query):
        found = [torch.empty(one.shape, dtype=lse.dtype, device=one.device) for one in (query, key, value)]
        if not query.is_meta:
            how = rules.of_block(causal, looks, position)
            ops().backward([query, key, value, grad], [lse, row_sum], found, how)
        tell_modes("attention_backward", found, grad, query, key, value)
        return tuple(found)
    heads, soft_cap = key.shape[1], rules.soft_cap
    query, lse, row_sum = _grouped(query, heads), _grouped(lse, heads), _grouped(row_sum, heads)
    wide = lse.dtype
    grad = _grouped(grad, heads).to(wide)
    scores = _scores(query, key, rules, causal, looks)
    probabilities = (scores - lse).exp_()
    mask = rules.mask(probabilities, position)
    used = probabilities if mask is None else probabilities * mask
    for_value = torch.matmul(used.transpose(-1, -2), grad).sum(2)
    upper = torch.matmul(grad, value.to(wide).transpose(-1, -2).unsqueeze(2))
    upper = upper if mask is None else upper * mask
    slope = rules.scale if not soft_cap else (1 - (scores.clamp(min=-soft_cap) / soft_cap) ** 2) * rules.scale
    scores = probabilities * (upper - row_sum) * slope
    for_query = torch.matmul(scores, key.to(wide).unsqueeze(2)).flatten(1, 2)
    for_key = torch.matmul(scores.transpose(-1, -2), query.to(wide)).sum(2)
    return for_query, for_key, for_value

"""Attention of blocks: queries meet keys block after block, with the running maximum and sum of each row of scores, and
only one block of scores is ever there.

Tensors are ``[batch, heads, tokens, size]``; key/value heads may be fewer, and are then read by equal runs of query
heads. Source: Dao, "FlashAttention-2" (2023), algorithms 1 and 2. On the CPU the kernels of csrc/kernels/attention.h
compute it, by tiles; elsewhere, in fp64 and with dropout torch does, a block of scores at a time.
"""

import functools

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator

_BY_KERNEL = (torch.float32, torch.bfloat16, torch.float16)


@functools.lru_cache(maxsize=4)
def _ops_of(threads):
    return _C.AttentionOps(threads)


def _by_kernel(query, dropped):
    """Whether the kernels compute this; what is on meta, as it would be computed here."""
    where = get_accelerator().device_name() if query.is_meta else query.device.type
    return where == "cpu" and query.dtype in _BY_KERNEL and (dropped is None or not dropped.probability)


def _rules(scale, causal, looks, soft_cap):
    return _C.BlockRules(scale, causal, looks=looks, soft_cap=soft_cap)


def _grouped(query, heads):
    """``[batch, key/value heads, readers, tokens, size]``."""
    return query.unflatten(1, (heads, query.shape[1] // heads))


def _scores(query, key, scale, causal, looks=None, soft_cap=0.0):
    """fp32 or wider, ``[batch, kv heads, readers, queries, keys]``; ``causal``: the block is on the diagonal;
    ``looks``: ``[batch, 1, queries, keys]``, where a query may look; ``soft_cap``: of scores, where it is not 0."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query.to(wide), key.to(wide).transpose(-1, -2).unsqueeze(2)) * scale
    if soft_cap:
        scores = (scores / soft_cap).tanh_() * soft_cap
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores if looks is None else scores.masked_fill(~looks.unsqueeze(2), float("-inf"))


class Dropped:
    """Which probabilities are dropped: the same ones whenever a block is computed again."""

    def __init__(self, probability, seed):
        self.probability, self.seed = probability, seed

    def mask(self, like, block):
        """What a block's probabilities are multiplied by; None where nothing is dropped."""
        if not self.probability:
            return None
        generator = torch.Generator(device=like.device).manual_seed(self.seed + 7919 * block[0] + block[1])
        kept = torch.rand(like.shape, generator=generator, device=like.device) >= self.probability
        return kept.to(like.dtype) / (1 - self.probability)


def _mask(dropped, like, block):
    return None if dropped is None else dropped.mask(like, block)


class Rows:
    """Some queries, and what they have seen so far."""

    def __init__(self, query, kv_heads, scale, dropped=None, soft_cap=0.0):
        self.query, self.kv_heads, self.scale, self.dropped, self.soft_cap = query, kv_heads, scale, dropped, soft_cap
        self.high = self.total = self.sum = None

    def see(self, key, value, causal=False, block=(0, 0), looks=None):
        if _by_kernel(self.query, self.dropped):
            self._see_by_kernel(key, value, causal, looks)
            return
        query = _grouped(self.query, self.kv_heads)
        scores = _scores(query, key, self.scale, causal, looks, self.soft_cap)
        high = scores.amax(-1, keepdim=True)
        if looks is not None:  # a query may see none of the block
            high = high.clamp_(min=torch.finfo(high.dtype).min)
        high = high if self.high is None else torch.maximum(high, self.high)
        scores = (scores - high).exp_()
        total, mask = scores.sum(-1, keepdim=True), _mask(self.dropped, scores, block)
        seen = torch.matmul(scores if mask is None else scores * mask, value.to(scores.dtype).unsqueeze(2))
        if self.high is not None:
            shrink = (self.high - high).exp_()
            total, seen = total + self.total * shrink, seen + self.sum * shrink
        self.high, self.total, self.sum = high, total, seen

    def _see_by_kernel(self, key, value, causal, looks):
        fresh, query = self.high is None, self.query
        if fresh:
            grouped = (query.shape[0], self.kv_heads, query.shape[1] // self.kv_heads, query.shape[2])
            made = [query.new_empty(*grouped, size, dtype=torch.float32) for size in (1, 1, value.shape[-1])]
            self.high, self.total, self.sum = made
        if not query.is_meta:
            rules = _rules(self.scale, causal, looks, self.soft_cap)
            state = [self.high, self.total, self.sum]
            _ops_of(torch.get_num_threads()).forward([query, key, value], state, fresh, rules)

    def result(self):
        """``(output, log of the sum of exponentials of each row)``; zeros for a query that has seen nothing."""
        self.total = self.total.clamp(min=torch.finfo(self.total.dtype).tiny)
        output = (self.sum / self.total).to(self.query.dtype).flatten(1, 2)
        lowest = torch.finfo(self.high.dtype).min
        return output, (self.high.clamp(min=lowest) + self.total.log()).flatten(1, 2)


def block_gradients(
    query, key, value, grad, row_sum, lse, scale, causal, dropped=None, block=(0, 0), looks=None, soft_cap=0.0
):
    """Of one block: ``(queries', keys', values')`` gradients, fp32 or wider. ``grad``: of the output; ``row_sum``: the
    sum over features of output times ``grad``; ``lse``: what ``Rows.result`` has returned."""
    if _by_kernel(query, dropped):
        found = [torch.empty(one.shape, dtype=lse.dtype, device=one.device) for one in (query, key, value)]
        if not query.is_meta:
            rules = _rules(scale, causal, looks, soft_cap)
            _ops_of(torch.get_num_threads()).backward([query, key, value, grad], [lse, row_sum], found, rules)
        return tuple(found)
    heads = key.shape[1]
    query, lse, row_sum = _grouped(query, heads), _grouped(lse, heads), _grouped(row_sum, heads)
    wide = lse.dtype
    grad = _grouped(grad, heads).to(wide)
    scores = _scores(query, key, scale, causal, looks, soft_cap)
    probabilities = (scores - lse).exp_()
    mask = _mask(dropped, probabilities, block)
    used = probabilities if mask is None else probabilities * mask
    for_value = torch.matmul(used.transpose(-1, -2), grad).sum(2)
    upper = torch.matmul(grad, value.to(wide).transpose(-1, -2).unsqueeze(2))
    upper = upper if mask is None else upper * mask
    slope = scale if not soft_cap else (1 - (scores.clamp(min=-soft_cap) / soft_cap) ** 2) * scale
    scores = probabilities * (upper - row_sum) * slope
    for_query = torch.matmul(scores, key.to(wide).unsqueeze(2)).flatten(1, 2)
    for_key = torch.matmul(scores.transpose(-1, -2), query.to(wide)).sum(2)
    return for_query, for_key, for_value

"""Attention over a sequence of which each rank of a ring has a part: keys and values are sent from rank to rank while
each rank computes with those that it has. No head is cut, so there may be more ranks than heads.

Causal work is balanced: of ``2 n`` equal pieces rank ``r`` of ``n`` computes with pieces ``r`` and ``2 n - 1 - r``,
which see ``2 n + 1`` pieces together, whatever ``r`` is. Sources: Liu et al., "Ring Attention with Blockwise
Transformers" (2023); Brandon et al., "Striped Attention" (2023), on balance.
"""

import torch

from deepspeed import comm as dist
from deepspeed.ops.attention.blocks import Rows, ScoreRules, block_gradients, sink_gradient
from deepspeed.sequence.exchange import check_lengths, start_views

TOKENS = 2  # the dimension of [batch, heads, tokens, size]


class Ring:
    def __init__(self, group, causal):
        self.group, self.causal = group, causal
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)

    # ---- balance -----------------------------------------------------------------------------------------------------
    def pieces(self, rank):
        """The numbers of the pieces that ``rank`` computes with."""
        return (rank, 2 * self.world - 1 - rank) if self.causal else (2 * rank, 2 * rank + 1)

    def balanced(self, tensors, back=False):
        """``tensors`` (parts in order) as the pieces of this rank, end to end; ``back``: the other way."""
        if not self.causal:
            return list(tensors)
        held = [(2 * rank, 2 * rank + 1) for rank in range(self.world)]  # pieces of the parts in order
        computed = [self.pieces(rank) for rank in range(self.world)]
        source, target = (computed, held) if back else (held, computed)
        out = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        split, into = ([tensor.chunk(2, TOKENS) for tensor in of] for of in (tensors, out))
        mine, own = source[self.rank], target[self.rank]
        give = [[one[mine.index(piece)] for piece in mine if piece in there for one in split] for there in target]
        take = [[one[own.index(piece)] for piece in there if piece in own for one in into] for there in source]
        return self.take((start_views(give, take, self.group), out))

    # ---- travel ------------------------------------------------------------------------------------------------------
    def send_on(self, tensors):
        """Starts to send ``tensors`` to the next rank; ``take`` gets those of the one before."""
        received = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        give, take = [[] for _ in range(self.world)], [[] for _ in range(self.world)]
        give[(self.rank + 1) % self.world], take[(self.rank - 1) % self.world] = list(tensors), received
        return start_views(give, take, self.group), received

    @staticmethod
    def take(travelling):
        work, received = travelling
        work.wait()
        return received

    def blocks(self, source):
        """``(which of my pieces, which of source's, whether on the diagonal)`` of what is looked at."""
        if not self.causal:
            return [(None, None, False)]
        mine, theirs = self.pieces(self.rank), self.pieces(source)
        return [
            (mine.index(query), theirs.index(key), query == key) for query in mine for key in theirs if key <= query
        ]

    def spans(self, mine, theirs, source, length):
        """The tokens of the whole sequence, of queries and of keys, in a block of ``blocks``, where parts have
        ``length``."""
        if not self.causal:
            return _run(self.rank, length), _run(source, length)
        half = length // 2
        return _run(self.pieces(self.rank)[mine], half), _run(self.pieces(source)[theirs], half)

    def steps(self, held, looks):
        """For each part of keys and values, ``held`` first, its blocks: ``(which of my pieces, which of theirs, keys
        and values, whether on the diagonal, the first query and key in the whole sequence, where queries may look)``.
        While a step is used the next part travels."""
        for step in range(self.world):
            travelling = self.send_on(held) if step + 1 < self.world else None
            yield self._seen(held, (self.rank - step) % self.world, looks)
            held = self.take(travelling) if travelling else None

    def _seen(self, held, source, looks):
        for mine, theirs, diagonal in self.blocks(source):
            queries, keys = self.spans(mine, theirs, source, held[0].shape[TOKENS])
            position, seen = (queries[0], keys[0]), [_piece(one, theirs) for one in held]
            yield mine, theirs, seen, diagonal, position, looks and looks(queries, keys)


def _run(index, length):
    return index * length, (index + 1) * length


def _piece(tensor, which):
    return tensor if which is None else tensor.chunk(2, TOKENS)[which]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, group, causal, rules, looks):
        ring, own = Ring(group, causal), rules._replace(sinks=sinks)
        query, key, value = ring.balanced([query, key, value])
        rows = [Rows(_piece(query, which), key.shape[1], own) for which in ((0, 1) if causal else (None,))]
        for blocks in ring.steps([key, value], looks):
            for mine, _, keys, *how in blocks:
                rows[mine or 0].see(*keys, *how)
        output, lse = (torch.cat(pair, dim=TOKENS) for pair in zip(*(one.result() for one in rows)))
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.ring, ctx.rules, ctx.looks = ring, rules, looks
        return ring.balanced([output], back=True)[0]

    @staticmethod
    def backward(ctx, grad):
        query, key, value, sinks, output, lse = ctx.saved_tensors
        ring = ctx.ring
        (grad,) = ring.balanced([grad.contiguous()])
        row_sum = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1, keepdim=True)
        for_query = torch.zeros_like(query, dtype=lse.dtype)
        sums = [torch.zeros_like(one, dtype=lse.dtype) for one in (key, value)]
        for blocks in ring.steps([key, value], ctx.looks):
            # Keys and values go ahead while their gradients are computed, which follow them.
            for mine, theirs, keys, *how in blocks:
                queries, *own = (_piece(one, mine) for one in (query, grad, row_sum, lse))
                found = block_gradients(queries, *keys, *own, ctx.rules, *how)
                _piece(for_query, mine).add_(found[0])
                for total, one in zip(sums, found[1:]):
                    _piece(total, theirs).add_(one)
            sums = ring.take(ring.send_on(sums))  # after the last step each sum is on the rank of its keys
        grads = [one.to(query.dtype) for one in (for_query, *sums)]
        for_sinks = None if sinks is None else sink_gradient(sinks, lse, row_sum).to(sinks.dtype)
        return (*ring.balanced(grads, back=True), for_sinks, *[None] * 4)


def ring_attention(
    query, key, value, group, causal=True, scale=None, looks=None, soft_cap=0.0, sinks=None, dropped=None
):
    """This rank's part of the attention over a sequence of which each rank of ``group`` has an equal part, in order.

    ``[batch, heads, tokens, size]``; key/value heads may be fewer, and are read by equal runs of query heads.
    ``causal``: parts have an even number of tokens. ``looks(queries, keys)``, of two runs ``(start, stop)`` of tokens
    of the whole sequence: where a query may look beside being causal, ``[batch or 1, 1, queries, keys]``, or None.
    ``scale``, ``soft_cap``, ``sinks`` (``[heads]``, the same on all ranks; a rank's gradient is that of its part),
    ``dropped``: see ``ScoreRules`` in ops/attention/blocks.py.
    """
    check_lengths(query.shape[TOKENS], group, query.device)
    if causal and query.shape[TOKENS] % 2:
        raise ValueError(
            f"causal attention in a ring balances work by halves: a part of {query.shape[TOKENS]} tokens has none"
        )
    if query.shape[1] % key.shape[1] or key.shape[:3] != value.shape[:3] or key.shape[TOKENS] != query.shape[TOKENS]:
        raise ValueError(
            f"query, key and value of shapes {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)} do not "
            "belong to one sequence"
        )
    rules = ScoreRules.checked(query, scale, soft_cap, sinks, dropped)._replace(sinks=None)
    return _RingAttention.apply(query, key, value, sinks, group, causal, rules, looks)

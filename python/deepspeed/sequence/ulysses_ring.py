"""For more ranks than heads: as many neighbours as heads allow exchange tokens for heads, and their groups pass keys
and values in a ring."""

import torch

from deepspeed import comm as dist
from deepspeed.comm.mesh_views import Members
from deepspeed.sequence import exchange
from deepspeed.sequence.heads import HeadPlan
from deepspeed.sequence.ring import ring_attention


def exchanging(ranks, heads):
    """The number of ranks that exchange heads: the largest divisor of ``ranks`` that leaves a head for each rank."""
    return max(size for size in range(1, ranks + 1) if ranks % size == 0 and size <= heads)


class UlyssesRing:
    """Attention over a sequence that the ranks of ``group`` share, with ``heads`` query heads. Every rank of the group
    makes it, at one time. Called with ``[batch, part, heads, size]``. ``size``: the number of neighbours that exchange
    heads; None: as many as possible."""

    def __init__(self, group, heads, size=None):
        ranks, me = dist.get_all_ranks_from_group(group), dist.get_rank()
        size, place = exchanging(len(ranks), heads) if size is None else size, ranks.index(me)
        self.size, self.place = size, place % size
        self.neighbours = Members(ranks[place // size * size :][:size], me).group
        self.ring = Members(ranks[place % size :: size], me).group

    def takes(self, length, causal):
        """Whether parts of ``length`` can be balanced."""
        return not causal or length * self.size % 2 == 0

    def __call__(self, query, key, value, causal, scale=None, looks=None, soft_cap=0.0, sinks=None, dropped=None):
        plan = HeadPlan(query.shape[2], key.shape[2], self.size)
        parts = [query, key, value]
        if self.size > 1:
            parts = exchange.to_heads(parts, plan.ranges(), self.neighbours, 0, heads_first=True)
        q, k, v = parts
        if plan.repeats(self.place) is None:
            index = torch.tensor(plan.kv_of_queries(self.place), device=k.device)
            k, v = k.index_select(2, index), v.index_select(2, index)
        start, stop = plan.query_ranges[self.place]
        sinks, dropped = None if sinks is None else sinks[start:stop], dropped and dropped.of_heads(start)
        parts = [x.transpose(1, 2) for x in (q, k, v)]
        out = ring_attention(*parts, self.ring, causal, scale, looks, soft_cap, sinks, dropped).transpose(1, 2)
        if self.size == 1:
            return out
        return exchange.to_sequence([out], [plan.query_ranges], self.neighbours, 0)[0]

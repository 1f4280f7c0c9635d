"""For more ranks than heads: as many neighbours as heads allow exchange tokens for heads, and their groups pass keys
and values in a ring."""

from deepspeed import comm as dist
from deepspeed.comm.mesh_views import Members
from deepspeed.sequence import exchange, methods
from deepspeed.sequence.ring import ring_attention


class UlyssesRing:
    """Attention over a sequence that the ranks of ``group`` share, with ``heads`` query heads. Every rank of the group
    makes it, at one time. Called with ``[batch, part, heads, size]``. ``size``: the number of neighbours that exchange
    heads; None: as many as possible."""

    def __init__(self, group, heads, size=None):
        ranks, me = dist.get_all_ranks_from_group(group), dist.get_rank()
        size, rank = size or methods.exchanging("auto", heads, ["here"] * len(ranks)), ranks.index(me)
        self.size = size
        self.neighbours = Members(ranks[rank // size * size :][:size], me).group
        self.ring = Members(ranks[rank % size :: size], me).group

    def takes(self, length, causal):
        """Whether parts of ``length`` can be balanced."""
        return not causal or length * self.size % 2 == 0

    def __call__(self, query, key, value, causal, scale=None, looks=None, soft_cap=0.0, sinks=None, dropped=None):
        heads = exchange.HeadExchange(query.shape[2], key.shape[2], self.neighbours)
        q, k, v = heads.to_heads([query, key, value], heads_first=True)
        k, v = heads.spread(k, v)
        start, stop = heads.own
        sinks, dropped = None if sinks is None else sinks[start:stop], dropped and dropped.of_heads(start)
        parts = [x.transpose(1, 2) for x in (q, k, v)]
        out = ring_attention(*parts, self.ring, causal, scale, looks, soft_cap, sinks, dropped).transpose(1, 2)
        return heads.to_sequence([out])[0]

"""Ranks exchange parts of a sequence with all heads for the whole sequence with some heads, and back.

Tensors are ``[batch, sequence, heads, ...]`` or ``[sequence, batch, heads, ...]``. ``ranges``: for each tensor the run
of heads of each rank; runs may overlap, then heads are copied, and their gradients are added up. All tensors of one
call are exchanged by one ``all_to_all`` on strided views, without packing (csrc/parallel/sequence_exchange.h). Each
direction is the other's gradient.
"""

import torch

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.comm import held
from deepspeed.comm.group_communicators import native_of
from deepspeed.comm.mesh import made_here
from deepspeed.sequence.heads import HeadPlan

HEADS = 2  # the dimension


def sequence_dim(batch_dim):
    """The dimension of the sequence of a tensor whose batches are in ``batch_dim`` (0 or 1)."""
    return 1 - batch_dim


def _native(group, tensor):
    """The core's exchange among the ranks of ``group`` on the device of ``tensor``."""
    ranks, known = native_of(group, tensor), made_here().exchanges
    if ranks not in known:
        known[ranks] = _C.SequenceExchange(ranks)
        held.hold(known[ranks], [ranks])
    return known[ranks]


def exchanged(tensors, ranges, group, batch_dim, to_heads, heads_first=False):
    """With a gradient. ``to_heads``: of each tensor the whole sequence, with this rank's run of heads; else this rank's
    part of the sequence, with all heads, and copies of a head added up.

    ``heads_first``: the memory layout of the results is ``[batch, heads, sequence, ...]``, so that attention only
    transposes them; their shape is the same.
    """
    along = sequence_dim(batch_dim)
    native, length, ranks = _native(group, tensors[0]), tensors[0].shape[along], len(ranges[0])
    call, tokens = (native.to_heads, length) if to_heads else (native.to_sequence, length // ranks)
    return call(list(tensors), [tokens] * ranks, ranges, along, heads_first)


def start(tensor, runs, group, batch_dim, to_heads):
    """``exchanged`` of one tensor without a gradient: ``(result, work)``, complete when ``work.wait()`` has
    returned."""
    along, native = sequence_dim(batch_dim), _native(group, tensor)
    length = tensor.shape[along]
    call, tokens = (native.start_to_heads, length) if to_heads else (native.start_to_sequence, length // len(runs))
    results, work = call([tensor], [tokens] * len(runs), [runs], along)
    return results[0], work


class HeadExchange:
    """The exchanges of one attention of ``query`` and ``kv`` heads among the ranks of ``group``. ``plan``: the heads of
    each rank; ``own``: this rank's run of query heads, which may be empty; ``repeats``: the number of query heads that
    read each of the heads that ``spread`` returns."""

    def __init__(self, query, kv, group, batch_dim=0):
        self.group, self.batch_dim = group, batch_dim
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.plan = HeadPlan(query, kv, self.world)
        self.own, self.repeats = self.plan.query_ranges[self.rank], self.plan.repeats(self.rank)
        self.index = None  # of the key/value heads, one for each query head, where those do not come in even runs
        if self.repeats is None:
            self.index, self.repeats = self.plan.kv_of_queries(self.rank), 1

    def to_heads(self, tensors, heads_first=False):
        """Returns the whole sequence of query, key and value, or of the first of them, with this rank's heads."""
        return self._exchanged(tensors, True, heads_first)

    def to_sequence(self, tensors):
        """The other way."""
        return self._exchanged(tensors, False)

    def _exchanged(self, tensors, *how):
        ranges = self.plan.ranges()[: len(tensors)]
        return exchanged(tensors, ranges, self.group, self.batch_dim, *how) if self.world > 1 else list(tensors)

    def spread(self, *tensors, dim=HEADS):
        """Keys and values with heads that equal runs of query heads read: an attention that repeats key/value heads
        evenly would pair wrong ones."""
        if self.index is None:
            return tensors
        index = torch.tensor(self.index, device=tensors[0].device)
        return [one.index_select(dim, index) for one in tensors]


def start_views(give, take, group):
    """``give[rank]``, lists of tensors with any strides, are sent to ``take[rank]`` of each rank, without a gradient.
    Returns the handle to wait for."""
    return _native(group, next(tensor for part in (*give, *take) for tensor in part)).start_views(give, take)


def handed_over(group, like):
    """``(calls, elements)`` of this rank's exchanges in ``group`` so far, elements for itself included."""
    native = _native(group, like)
    return native.calls, native.elements


def lengths_of(length, group, device):
    """``length`` of every rank."""
    mine = torch.tensor([length], dtype=torch.int64, device=device)
    every = mine.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(every, mine, group=group)
    return [length] * len(every) if every.is_meta else every.tolist()  # the other ranks of a planned step are like it


def check_lengths(length, group, device):
    """Raises ValueError on every rank if the ranks' parts of a sequence are not equally long."""
    found = lengths_of(length, group, device)
    if len(set(found)) > 1:
        each = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(found))
        raise ValueError(
            f"the ranks that share a sequence hold parts of different lengths ({each}): cut every batch into "
            f"{len(found)} equal parts (UlyssesSPDataLoaderAdapter does so, and pads with pad=True)"
        )


# ---- which groups cut unevenly: the same calls on all their ranks, so all know the same ------------------------------
def note_uneven(group):
    made_here().uneven_heads.add(tuple(dist.get_all_ranks_from_group(group)))


def cuts_unevenly(group):
    return tuple(dist.get_all_ranks_from_group(group)) in made_here().uneven_heads

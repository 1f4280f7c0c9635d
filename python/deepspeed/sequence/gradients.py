"""One rule for losses of a sequence that ranks share.

An engine averages gradients over all ranks that hold the same weights. Therefore, if every rank of a group computes a
loss from gathered values, its gradient must be the one that autograd over all these ranks would give: the sum of their
gradients. torch's differentiable ``all_gather`` gives this sum. Published losses give each rank the part of its own
gradient, which is smaller by the number of ranks; they call ``summed_in`` and give the sum if an engine trains on their
group. The ZeRO stage does not matter.
"""

import weakref

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.comm.group_communicators import native_of
from deepspeed.comm.mesh import made_here


def train_on(engine, group):
    """Notes that ``engine`` trains sequences that the ranks of ``group`` share, until it is dropped or destroyed."""
    made_here().sequences.setdefault(tuple(dist.get_all_ranks_from_group(group)), weakref.WeakSet()).add(engine)


def leave(engine):
    for engines in made_here().sequences.values():
        engines.discard(engine)


def summed_in(group):
    """Whether an engine trains sequences that the ranks of ``group`` share."""
    return bool(made_here().sequences.get(tuple(dist.get_all_ranks_from_group(group))))


def own_part(grad, group):
    """This rank's part of the gradient of a tensor that was gathered from the ranks of ``group``: a part
    of the sum over ranks if an engine trains on them, else of this rank's own gradient."""
    ranks = native_of(group, grad)
    return _C.scatter_over_ranks(ranks, _C.reduce_over_ranks(ranks, grad) if summed_in(group) else grad, 0)


def parts_of_all(own, group):
    """The ranks' tensors ``own``, joined along the first dimension. The gradient is ``own_part``."""
    ranks = native_of(group, own)
    every = _C.gather_over_ranks(ranks, own, 0)
    return _C.share_over_ranks(ranks, every) if summed_in(group) else every


def gathered(tensor, group, dim):
    """The ranks' parts of ``tensor`` along ``dim``, one after the other; gradients are added up over the ranks."""
    ranks = native_of(group, tensor)
    return _C.share_over_ranks(ranks, _C.gather_over_ranks(ranks, tensor, dim))


def summed(tensor, group):
    """The sum of the ranks' tensors; gradients are added up over the ranks, too."""
    ranks = native_of(group, tensor)
    return _C.share_over_ranks(ranks, _C.reduce_over_ranks(ranks, tensor))

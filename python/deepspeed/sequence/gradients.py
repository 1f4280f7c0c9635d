"""One rule for losses of a sequence that ranks share.

An engine averages gradients over all ranks that hold the same weights. Therefore, if every rank of a group computes a
loss from gathered values, its gradient must be the one that autograd over all these ranks would give: the sum of their
gradients. torch's differentiable ``all_gather`` gives this sum. Published losses give each rank the part of its own
gradient, which is smaller by the number of ranks; they call ``summed_in`` and give the sum if an engine trains on their
group. The ZeRO stage does not matter.
"""

import weakref

import torch

from deepspeed import comm as dist
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
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world > 1 and summed_in(group):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=group)
    return grad.narrow(0, rank * (grad.shape[0] // world), grad.shape[0] // world)


def parts_of_all(own, group):
    """The ranks' tensors ``own``, joined along the first dimension, without a gradient: see ``own_part``."""
    world = dist.get_world_size(group)
    if world == 1:
        return own
    every = own.new_empty((world * own.shape[0], *own.shape[1:]))
    dist.all_gather_into_tensor(every, own.contiguous(), group=group)
    return every


class Gathered(torch.autograd.Function):
    """``apply(tensor, group)``: the ranks' tensors, stacked. The gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, tensor.contiguous(), group=group)
        return torch.stack(every)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None

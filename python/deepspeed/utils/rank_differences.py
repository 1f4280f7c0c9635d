"""Finds tensors that ranks should have alike and do not."""

import torch

from deepspeed import comm as dist


def first_difference(named, group):
    """``(name, rank, its shape, first rank, that one's shape)`` of the first tensor of ``named``, ``(name, tensor)``
    pairs, that a rank of torch's ``group`` has otherwise than the first one; None where all are equal. Ranks are those
    of the job. Every rank of the group calls it with the same names."""
    own = [(name, tuple(one.shape), _digest(one)) for name, one in named if isinstance(one, torch.Tensor)]
    everyones = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, own, group=group)
    ranks = dist.get_all_ranks_from_group(group)
    for rank, theirs in enumerate(everyones):
        for first, other in zip(everyones[0], theirs):
            if first != other:
                return first[0], ranks[rank], list(other[1]), ranks[0], list(first[1])
    return None


def _digest(tensor):
    """Two numbers that differ for most pairs of different tensors."""
    values = tensor.detach().double().flatten()
    weights = torch.arange(1, values.numel() + 1, dtype=values.dtype, device=values.device)
    return float(values.sum()), float((values * weights.sin()).sum())

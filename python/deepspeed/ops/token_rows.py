"""Rows of tokens by number: the kernels of csrc/kernels/routes.h."""

import functools

import torch

from deepspeed import _native


@functools.lru_cache(maxsize=4)
def _ops_of(threads):
    return _native._C.RouteOps(threads)


def ops():
    """The kernels, on as many threads as torch's."""
    return _ops_of(torch.get_num_threads())


def positions_of(numbers, count):
    """For each of ``count`` numbers its position in ``numbers``, a tensor of any shape, flat; int32, -1 for none.
    Negative numbers have no position. It is the inverse of a permutation."""
    flat = numbers.reshape(-1).long()
    found = torch.full((count + 1,), -1, dtype=torch.int32, device=flat.device)
    positions = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
    return found.scatter_(0, torch.where(flat < 0, count, flat), positions)[:count]

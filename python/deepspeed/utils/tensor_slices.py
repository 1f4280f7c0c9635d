"""Slices of tensors along one dimension, as a ``TensorCut`` (``csrc/plan/tensor_cut.h``) gives them to ranks."""

from itertools import accumulate, pairwise

import torch

from deepspeed import _native


def even_cut(sizes, ranks, what):
    """The cut of sub-parameters of ``sizes``, each in equal parts for ``ranks`` ranks. Raises ValueError, which begins
    with ``what``, where that leaves a rest."""
    for size in sizes:
        if size % ranks:
            raise ValueError(f"{what}: {size} elements cannot be cut into {ranks} equal tensor-parallel slices")
    return _native._C.TensorCut(sizes, [_native._C.unit_runs(size, ranks) for size in sizes])


def cut_of_widths(sizes, widths):
    """The cut of sub-parameters of ``sizes``. ``widths``: for each one the elements of every rank, which lie end to
    end."""
    return _native._C.TensorCut(sizes, [list(pairwise(accumulate(width, initial=0))) for width in widths])


def table_of(cut):
    """The runs ``[start, length]`` that each rank has of the whole, in plain lists, for files."""
    return [[list(run) for run in cut.runs(rank)] for rank in range(cut.ranks())]


def cut_of_table(table):
    """The cut of which ``table_of`` gives this table."""
    ends = {end for own in table for start, length in own for end in (start, start + length)}
    runs, sizes = [], []
    for start, stop in [*pairwise(sorted({0, *ends}))] or [(0, 0)]:
        has = (any(low <= start and stop <= low + length for low, length in own) for own in table)
        runs.append([(0, stop - start if one else 0) for one in has])
        sizes.append(stop - start)
    return _native._C.TensorCut(sizes, runs)


def narrow(whole, dim, cut, rank):
    """The slice of ``whole`` that ``rank`` has, a copy: what it has of each sub-parameter, side by side."""
    if whole.shape[dim] != cut.size():
        raise ValueError(
            f"a tensor of shape {tuple(whole.shape)} is cut along dimension {dim} by a table of {cut.size()} elements"
        )
    return torch.cat([whole.narrow(dim, *run) for run in cut.runs(rank) or [(0, 0)]], dim=dim)


def join(slices, dim, cut):
    """The whole tensor of the ``slices`` of all ranks, in rank order. An element that several ranks have is taken from
    the first of them."""
    found, wanted = [one.shape[dim] for one in slices], [cut.width(rank) for rank in range(cut.ranks())]
    if found != wanted:
        raise ValueError(f"the slices have {found} elements along dimension {dim}, the ranks of their cut {wanted}")
    pieces = [
        (in_whole, one.narrow(dim, in_slice, length))
        for rank, one in enumerate(slices)
        for in_slice, in_whole, length in cut.owned(rank)
    ]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda entry: entry[0])] or slices[:1], dim=dim)

"""Slices of tensors, cut and put together by a table, beside plain lists of indices."""

import random

import pytest
import torch
from tests.refusals import refused

from deepspeed._native import _C
from deepspeed.utils.tensor_slices import cut_of_widths, even_cut, join, narrow


def random_runs(rng, size, ranks):
    """One run of a sub-parameter for each rank: they lie end to end, and some of them grow into others."""
    edges = sorted([0, size, *(rng.randint(0, size) for _ in range(ranks - 1))])
    runs = [list(run) for run in zip(edges[:-1], edges[1:], strict=True)]
    kind = rng.choice(["apart", "whole", "longer", "in any order"])
    for run in runs:
        if kind == "whole":
            run[:] = [0, size]
        elif kind == "longer" and rng.random() < 0.4:
            run[1] = rng.randint(run[1], size)
    if kind == "in any order":
        rng.shuffle(runs)
    return [tuple(run) for run in runs]


def indices_of(sizes, runs, rank):
    """The elements of the whole that a rank has, one by one."""
    found, before = [], 0
    for size, run in zip(sizes, runs, strict=True):
        found += [before + element for element in range(*run[rank])]
        before += size
    return found


def random_tensor(rng, dim, size):
    """A tensor of random shape with ``size`` elements along ``dim``, at times one with other strides."""
    shape = [rng.randint(1, 3) for _ in range(rng.randint(dim + 1, 4))]
    shape[dim] = size
    made = torch.arange(float(torch.Size(shape).numel()))
    return (
        made.reshape(shape) if rng.random() < 0.5 else made.reshape(shape[::-1]).permute(*reversed(range(len(shape))))
    )


def test_slices_have_the_elements_of_their_ranks_and_make_the_whole_again():
    rng, copied, empty = random.Random(3), 0, 0
    for case in range(400):
        ranks, dim = case % 8 + 1, rng.randint(0, 2)
        sizes = [rng.randint(0, 9) for _ in range(rng.randint(1, 4))]
        runs = [random_runs(rng, size, ranks) for size in sizes]
        cut, whole = _C.TensorCut(sizes, runs), random_tensor(rng, dim, sum(sizes))
        slices = [narrow(whole, dim, cut, rank) for rank in range(ranks)]
        indices = [indices_of(sizes, runs, rank) for rank in range(ranks)]
        for mine, index in zip(slices, indices, strict=True):
            assert torch.equal(mine, whole.index_select(dim, torch.tensor(index, dtype=torch.int64)))
        assert torch.equal(join(slices, dim, cut), whole)
        if dim == whole.dim() - 1:
            assert torch.equal(join(slices, -1, cut), whole) and torch.equal(narrow(whole, -1, cut, 0), slices[0])
        copied += cut.copied()
        empty += not all(indices)
    assert copied > 50 and empty > 50


def test_a_copied_element_comes_from_its_first_rank():
    cut = _C.TensorCut([4], [[(0, 3), (1, 4)]])
    assert cut.owned(0) == [(0, 0, 3)] and cut.owned(1) == [(2, 3, 1)] and cut.mixed()
    assert join([torch.zeros(3), torch.ones(3)], 0, cut).tolist() == [0, 0, 0, 1]


def test_a_slice_has_memory_of_its_own():
    whole = torch.zeros(4, 3)
    for cut in (_C.TensorCut([4], [[(0, 4)]]), even_cut([4], 2, "w"), even_cut([2, 2], 2, "w")):
        narrow(whole, 0, cut, 0).fill_(1)
    assert not whole.any()
    mine = narrow(whole.t(), 1, even_cut([4], 2, "w"), 1)
    assert mine.is_contiguous() and mine.shape == (3, 2)


def test_equal_parts_and_widths():
    cut = even_cut([6, 3], 3, "the parameter 'w'")
    assert [cut.runs(rank) for rank in range(3)] == [[(0, 2), (6, 1)], [(2, 2), (7, 1)], [(4, 2), (8, 1)]]
    cut = cut_of_widths([6, 3], [[4, 2], (2, 1)])
    assert [cut.runs(rank) for rank in range(2)] == [[(0, 4), (6, 2)], [(4, 2), (8, 1)]]
    assert not cut.copied() and cut.holders(1) == [1]


@pytest.mark.parametrize(
    "text, call",
    [
        ("'w': 3 elements cannot be cut into 2 equal", lambda: even_cut([4, 3], 2, "'w'")),
        ("from 4 to 6 of sub-parameter 0, which has 5", lambda: cut_of_widths([5], [[4, 2]])),
        ("no rank has the elements from 4 to 5 of sub-parameter 0", lambda: cut_of_widths([5], [[2, 2]])),
        (
            r"shape \(5, 4\) is cut along dimension 0 by a table of 4",
            lambda: narrow(torch.zeros(5, 4), 0, even_cut([4], 2, "w"), 0),
        ),
        ("rank 2 is not one of the 2 ranks", lambda: narrow(torch.zeros(4), 0, even_cut([4], 2, "w"), 2)),
        (
            r"have \[2, 3\] elements along dimension 0, the ranks of their cut \[2, 2\]",
            lambda: join([torch.zeros(2), torch.zeros(3)], 0, even_cut([4], 2, "w")),
        ),
        (r"have \[2\] elements", lambda: join([torch.zeros(2)], 0, even_cut([4], 2, "w"))),
    ],
)
def test_what_does_not_fit_is_named(text, call):
    refused(ValueError, text, call)


def test_runs_of_heads_are_lists_of_start_and_stop():
    assert _C.unit_runs(5, 3) == [(0, 2), (2, 4), (4, 5)]
    assert _C.shared_runs([(0, 4), (4, 6)], 3, 2) == [(0, 2), (1, 2)]
    assert _C.grouped_runs(6, 2, 4) == ([(0, 2), (2, 3), (3, 5), (5, 6)], [(0, 1), (0, 1), (1, 2), (1, 2)])
    assert _C.grouped_runs(8, 8, 3) == ([(0, 3), (3, 6), (6, 8)],) * 2
    assert _C.shard_sizes(24, 3, 1, 8) == [9, 9, 6]
    refused(ValueError, "4 query heads leaves some of 8", lambda: _C.grouped_runs(4, 2, 8))

"""Topologies against loops over coordinates."""

import itertools
import math

import pytest

from deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    _prime_factors,
)
from refusals import refused


def test_two_axes():
    topology = ProcessTopology(axes=["row", "col"], dims=[2, 3])
    assert topology.world_size() == 6 and topology.get_axis_names() == ["row", "col"]
    assert (topology.get_dim("row"), topology.get_dim("col"), topology.get_dim("none")) == (2, 3, 0)
    assert topology.get_rank(row=1, col=0) == 3 and topology.get_coord(5) == topology.ProcessCoord(row=1, col=2)
    assert topology.get_axis_list(axis="row", idx=1) == [3, 4, 5]
    assert topology.get_axis_list(axis="col", idx=2) == [2, 5]
    assert topology.get_axis_comm_lists("row") == [[0, 3], [1, 4], [2, 5]]
    assert topology.get_axis_comm_lists("col") == [[0, 1, 2], [3, 4, 5]]
    assert topology.get_axis_comm_lists("none") == [] and str(topology) == "ProcessTopology(row=2, col=3)"


@pytest.mark.parametrize("dims", [(1, 1, 1), (2, 1, 2), (2, 3, 4), (1, 4, 2), (3, 2, 1)])
def test_three_axes(dims):
    pipes, copies, slices = dims
    topology = PipeModelDataParallelTopology(num_pp=pipes, num_mp=slices, num_dp=copies)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    every = list(itertools.product(*map(range, dims)))
    for rank, (pipe, data, model) in enumerate(every):
        assert topology.get_rank(pipe=pipe, data=data, model=model) == rank
        assert tuple(topology.get_coord(rank)) == (pipe, data, model)
        assert topology.filter_match(pipe=pipe, model=model) == [
            other for other, at in enumerate(every) if (at[0], at[2]) == (pipe, model)
        ]
        assert topology.along(["pipe", "model"], rank) == [o for o, at in enumerate(every) if at[1] == data]
    lists = topology.get_axis_comm_lists("data")
    assert lists == [[topology.get_rank(pipe=p, data=d, model=m) for d in range(copies)] for p in range(pipes)
                     for m in range(slices)]  # fmt: skip


def test_names_of_files():
    topology = ProcessTopology(axes=["a", "b"], dims=[2, 2])
    assert topology.get_rank_repr(rank=2) == "a_01-b_00"
    assert topology.get_rank_repr(rank=2, inner_sep="+", outer_sep="/") == "a+01/b+00"
    assert topology.get_rank_repr(rank=3, omit_axes=["a"]) == "b_01"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(rank=3) == ""
    assert PipeModelDataParallelTopology(2, 2, 2).get_rank_repr(rank=1) == "model_01"
    assert PipeModelDataParallelTopology(2, 2, 2).get_rank_repr(rank=1, omit_axes=["model"]) == "pipe_00-data_00"


def test_mates_of_the_illustration():
    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    assert topology.get_axis_comm_lists("pipe") == [[0, 2], [1, 3]]
    assert topology.get_axis_comm_lists("data") == [[0, 1], [2, 3]]


def test_bad_input():
    topology = PipeDataParallelTopology(2, 2)
    refused(ValueError, r"get_rank\(\) wants data, too; filter_match\(\) takes some", topology.get_rank, pipe=0)
    refused(ValueError, "there is no axis model: the topology has pipe, data", topology.filter_match, model=0)
    refused(ValueError, "there is no rank at ProcessCoord", topology.get_rank, pipe=0, data=2)
    refused(ValueError, "rank 4 is not in the topology: it has ranks 0 to 3", topology.get_coord, 4)
    refused(ValueError, "give each axis one size of at least 1", ProcessTopology, ["a"], [0])
    refused(RuntimeError, r"call deepspeed.init_distributed\(\) first", PipelineParallelGrid, topology)


def test_prime_factors():
    for number in range(1, 500):
        factors = _prime_factors(number)
        assert math.prod(factors) == number and factors == sorted(factors)
        assert all(factor % smaller for factor in factors for smaller in range(2, factor))
    for wrong in (0, -2):
        refused(ValueError, "has no prime factors", _prime_factors, wrong)

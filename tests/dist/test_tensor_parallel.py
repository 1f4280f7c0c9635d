"""Training with layers that ranks share (``tensor_parallel.autotp_size``) against one plain process."""

import pytest

from cases import Case, over
from claims import equals_plain
from harness import on_ranks
from programs import LANGUAGE_MODELS


@over("stage", "accumulate", dtype=["fp32", "bf16"], world=[2, 3, 4], name=list(LANGUAGE_MODELS), cover="pairs")
@on_ranks()
def test_equals_one_process(rank, world, name, stage, dtype, accumulate):
    equals_plain(rank, name, Case(stage, world, dtype, accumulate, tensor=world))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(4)
def test_two_groups_see_different_data(rank, world, stage):
    equals_plain(rank, "llama", Case(stage, world, accumulate=2, tensor=2))

"""Training with layers that ranks share (``tensor_parallel.autotp_size``) against one plain process."""

import pytest

import deepspeed
from cases import Case, over
from claims import equals_plain
from deepspeed.zero.parameters.sharded_parameter import is_sharded
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


@on_ranks(2)
def test_a_model_of_zero_init(rank, world):
    case = Case(3, world, tensor=2)
    model = LANGUAGE_MODELS["llama"].make()
    deepspeed.zero.Init(model, config_dict_or_path=case.config(LANGUAGE_MODELS["llama"]))
    assert all(is_sharded(param) for param in model.parameters())
    equals_plain(rank, "llama", case, model)

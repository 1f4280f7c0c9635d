"""``deepspeed.plan`` of models whose layers ranks share."""

import pytest
import torch

import deepspeed
import tensor_models
from deepspeed.module_inject.cut_plan import plan_of
from deepspeed.module_inject.explain import bytes_of
from runs import settings


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_and_all_reduces_are_those_of_the_cut(ranks):
    model, sample = tensor_models.model_of("gpt2"), {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    config = settings(0, optimizer="SGD", tensor_parallel={"autotp_size": ranks})
    plan = deepspeed.plan(model, config, world=ranks, sample=sample)
    cut = plan_of(model, ranks)
    for found in plan.ranks:
        # Two blocks have two all-reduces forward and two backward, each of samples x tokens x width numbers.
        assert found.calls["all_reduce", f"tensor of {ranks} ranks"] == (8, 8 * 2 * 8 * 48 * 4)
        rounded = found.owners["parameters"] - bytes_of(model, cut, found.rank)  # to 512 bytes for each parameter
        assert 0 <= rounded < 512 * len(list(model.parameters()))

"""``deepspeed.plan`` of models whose layers ranks share."""

import pytest
import torch

import deepspeed
import tensor_models
from deepspeed.module_inject.cut_plan import plan_of
from deepspeed.module_inject.cut_report import bytes_of
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


def test_a_cut_vocabulary_and_split_sequences():
    sample = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    section = {"autotp_size": 2, "split_sequence": True, "vocab_parallel_lm_head": True}
    config = settings(0, optimizer="SGD", tensor_parallel=section)
    plan = deepspeed.plan(tensor_models.model_of("gpt2"), config, world=2, sample=sample)
    whole = deepspeed.plan(
        tensor_models.model_of("gpt2"),
        settings(0, optimizer="SGD", tensor_parallel={"autotp_size": 2}),
        world=2,
        sample=sample,
    )
    for found, before in zip(plan.ranks, whole.ranks):
        calls, size = {verb: count for (verb, who), count in found.calls.items() if "tensor" in who}, 2 * 8 * 48 * 4
        # Each way four cut layers begin or end in two blocks, and the list of blocks begins or ends once. A gather
        # counts the part of a rank.
        assert calls["reduce_scatter"] == (8, 8 * size) and calls["all_gather"] == (10, 5 * size)
        words = 48 * 25 * 4 * 2  # of the head and of the embedding that another rank has
        assert abs(before.owners["parameters"] - found.owners["parameters"] - words) <= 1024

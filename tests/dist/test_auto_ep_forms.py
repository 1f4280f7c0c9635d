"""Unchanged models with experts in the memories and beside the axes of other features: states elsewhere, sequences that
ranks share, frozen experts."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from auto_ep_runs import config, follows, frozen_model_of, steps_of, train_one
from deepspeed.utils import groups
from deepspeed.zero import GatheredParameters
from harness import on_ranks
from hf_like_moe import model_of
from runs import NATIVE, engine_of, load_into


def zero(stage, folder, **devices):
    place = {"nvme_path": folder}
    return {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        **{key: {"device": device, **(place if device == "nvme" else {})} for key, device in devices.items()},
    }


@on_ranks(2, init=True)
def test_states_and_weights_rest_elsewhere(rank, world, folder):
    cases = [
        ("mixtral", 1, 2, {"offload_optimizer": "cpu"}),
        ("qwen3_moe", 3, 2, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
        ("mixtral", 3, 2, {"offload_optimizer": "nvme", "offload_param": "nvme"}),
        ("qwen3_moe", 2, 1, {"offload_optimizer": "cpu"}),
    ]
    for family, stage, ep_size, devices in cases:
        settings = config(world, stage, ep_size, zero_optimization=zero(stage, folder, **devices))
        engine = engine_of(model_of(family), settings)
        follows(engine, rank, train_one(family, 2, 2), (family, stage, devices))
        engine.destroy()


@on_ranks(4, init=True)
def test_sequences_that_ranks_share(rank, world):
    """Two copies of two ranks, each of which has half of the sequence: the loss is the mean over all tokens."""
    expected = train_one("qwen3_moe", 4, 2)
    for stage, ep_size in ((0, 4), (2, 2), (3, 4)):
        settings = config(world, stage, ep_size, sequence_parallel_size=2)
        settings["train_batch_size"] = world  # rows of two copies
        engine = engine_of(model_of("qwen3_moe"), settings)
        assert (engine.sequence_parallel_size, engine.dp_world_size) == (2, 2)
        follows(engine, rank, expected, (stage, ep_size))
        figures = engine.moe_statistics()
        assert all(sum(one["tokens_per_expert"]) == 2 * 8 * world for one in figures.values())
        engine.destroy()
        groups.clear()


@on_ranks(4, init=True)
def test_frozen_experts_in_slices(rank, world, folder):
    for family in ("mixtral", "qwen3_moe"):
        expected = train_one(family, 4, 3, make=frozen_model_of)
        engine = engine_of(frozen_model_of(family), config(world, 3, 2, checkpoint=NATIVE))
        assert steps_of(engine, rank, 2) == pytest.approx([step[rank] for step in expected[0][:2]], abs=3e-6)
        engine.save_checkpoint(folder, family)
        engine.destroy()
        for stage, ep_size in ((3, 1), (1, 4), (3, 4)):
            other = engine_of(frozen_model_of(family), config(world, stage, ep_size, checkpoint=NATIVE))
            experts = next(iter(other._experts.layers.values())).experts
            with GatheredParameters(list(experts.parameters()), modifier_rank=0), torch.no_grad():
                experts.w2.zero_()
            follows(load_into(other, folder, tag=family), rank, expected, (stage, ep_size), first=2)
            other.destroy()


@on_ranks(2, init=True)
def test_forwards_that_are_computed_again(rank, world):
    model = model_of("deepseek_v3")
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    follows(engine_of(model, config(world, 2, 2)), rank, train_one("deepseek_v3", 2, 2))

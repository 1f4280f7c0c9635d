"""Unchanged models with experts in the memories and beside the axes of other features: states elsewhere, sequences that
ranks share, frozen experts."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from auto_ep_runs import batch, check, config, frozen_model_of, steps_of, train_one
from deepspeed.utils import groups
from deepspeed.zero import GatheredParameters
from harness import run_ranks
from hf_like_moe import model_of
from runs import engine_of, take_step


def zero(stage, folder, **devices):
    place = {"nvme_path": folder}
    return {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        **{key: {"device": device, **(place if device == "nvme" else {})} for key, device in devices.items()},
    }


def offload_body(rank, world, folder, cases, expected):
    for family, stage, ep_size, devices in cases:
        losses, params = expected[family]
        settings = config(world, stage, ep_size, zero_optimization=zero(stage, folder, **devices))
        engine = engine_of(model_of(family), settings)
        own = steps_of(engine, rank, len(losses))
        assert own == pytest.approx([step[rank] for step in losses], abs=3e-6), (family, stage, devices)
        check(engine, rank, params)
        engine.destroy()
    return True


def test_states_and_weights_rest_elsewhere(tmp_path):
    cases = [
        ("mixtral", 1, 2, {"offload_optimizer": "cpu"}),
        ("qwen3_moe", 3, 2, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
        ("mixtral", 3, 2, {"offload_optimizer": "nvme", "offload_param": "nvme"}),
        ("qwen3_moe", 2, 1, {"offload_optimizer": "cpu"}),
    ]
    expected = {family: train_one(family, 2, 2) for family in ("mixtral", "qwen3_moe")}
    assert run_ranks(2, offload_body, str(tmp_path), cases, expected, init=True) == [True] * 2


def sequence_body(rank, world, expected):
    """Two copies of two ranks, each of which has half of the sequence: the loss is the mean over all tokens."""
    losses, params = expected
    for stage, ep_size in ((0, 4), (2, 2), (3, 4)):
        settings = config(world, stage, ep_size, sequence_parallel_size=2)
        settings["train_batch_size"] = world  # rows of two copies
        engine = engine_of(model_of("qwen3_moe"), settings)
        assert (engine.sequence_parallel_size, engine.dp_world_size) == (2, 2)
        own = []
        for step in range(len(losses)):
            own.append(take_step(engine, engine(batch(step, rank))))
        assert own == pytest.approx([step[rank] for step in losses], abs=3e-6), (stage, ep_size)
        check(engine, rank, params)
        figures = engine.moe_statistics()
        assert all(sum(one["tokens_per_expert"]) == 2 * 8 * world for one in figures.values())
        engine.destroy()
        groups.clear()
    return True


def test_sequences_that_ranks_share():
    assert run_ranks(4, sequence_body, train_one("qwen3_moe", 4, 2), init=True) == [True] * 4


def frozen_body(rank, world, folder, expected):
    native = {"checkpoint": {"writer": {"format": "safetensors"}}}
    for family, (losses, params) in expected.items():
        engine = engine_of(frozen_model_of(family), config(world, 3, 2, **native))
        assert steps_of(engine, rank, 2) == pytest.approx([step[rank] for step in losses[:2]], abs=3e-6)
        engine.save_checkpoint(folder, family)
        engine.destroy()
        for stage, ep_size in ((3, 1), (1, 4), (3, 4)):
            settings = config(world, stage, ep_size, **native)
            other = engine_of(frozen_model_of(family), settings)
            experts = next(iter(other._experts.layers.values())).experts
            with GatheredParameters(list(experts.parameters()), modifier_rank=0), torch.no_grad():
                experts.w2.zero_()
            other.load_checkpoint(folder, family)
            assert steps_of(other, rank, 1, first=2)[0] == pytest.approx(losses[2][rank], abs=3e-6), (stage, ep_size)
            check(other, rank, params)
            other.destroy()
    return True


def test_frozen_experts_in_slices(tmp_path):
    expected = {family: train_one(family, 4, 3, make=frozen_model_of) for family in ("mixtral", "qwen3_moe")}
    assert run_ranks(4, frozen_body, str(tmp_path), expected, init=True) == [True] * 4


def recomputed_body(rank, world, expected):
    losses, params = expected
    model = model_of("deepseek_v3")
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    engine = engine_of(model, config(world, 2, 2))
    assert steps_of(engine, rank, len(losses)) == pytest.approx([step[rank] for step in losses], abs=3e-6)
    check(engine, rank, params)
    return True


def test_forwards_that_are_computed_again():
    assert run_ranks(2, recomputed_body, train_one("deepseek_v3", 2, 2), init=True) == [True] * 2

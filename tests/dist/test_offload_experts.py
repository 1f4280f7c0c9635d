"""Experts and offload: states and parameters of experts rest where those of dense parameters do, and no bit changes."""

import gc
import os

import pytest
import torch

from harness import on_ranks
from hf_like_moe import WIDTH, model_of
from moe_models import values
from runs import engine_of as engine_on
from runs import everything, identical, load_into, settings, take_step


def engine_of(world, stage, zero, ep_size=2):
    adam = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}
    experts = {"enabled": True, "autoep_size": ep_size}
    made = settings(stage, optimizer=adam, zero=zero, gradient_clipping=0.3, expert_parallel=experts)
    return engine_on(model_of("mixtral"), made)


def train(engine, rank, steps):
    inputs = (values(50 * step + 7 * rank, 2, 4, WIDTH) * 2 for step in steps)
    return [torch.tensor(take_step(engine, engine(x)), dtype=torch.float64) for x in inputs]


def on(where, folder):
    section = {"device": "cpu"} if where == "cpu" else {"device": "nvme", "nvme_path": folder}
    return {"offload_optimizer": section}


@pytest.mark.any_device
@pytest.mark.sample("values")
@pytest.mark.parametrize(
    "stage, where, params, ep_size",
    [(2, "nvme", False, 2), (1, "cpu", False, 1), (3, "nvme", True, 2), (3, "cpu", True, 2)],
)
@on_ranks(2, init=True)
def test_experts_train_and_go_on_to_the_bit(rank, world, stage, where, params, ep_size, folder):
    """Without offload; with it, saved; without it again, from what the second one has saved."""
    zero = on(where, folder)
    if params:
        zero["offload_param"] = {**zero["offload_optimizer"], **({"max_in_cpu": 0} if where == "nvme" else {})}
    results, saved = [], os.path.join(folder, "saved")
    for given in ({}, zero):
        engine = engine_of(world, stage, given, ep_size)
        losses = train(engine, rank, range(2))
        if given:
            engine.save_checkpoint(saved)
        losses += train(engine, rank, range(2, 4))
        results.append([*losses, *everything(engine)])
        resting = {name: tier["resting_bytes"] for name, tier in engine.offload_report()["tiers"].items()}
        assert (resting["file" if where == "nvme" else "host"] > 0) == bool(given), resting
        engine.destroy()
        del engine
        gc.collect()
    assert identical(*results), "with and without"
    for given in ({}, zero):
        engine = load_into(engine_of(world, stage, given, ep_size), saved)
        losses = train(engine, rank, range(2, 4))
        assert identical([*losses, *everything(engine)], results[0][2:]), "resumed"
        engine.destroy()
        del engine
        gc.collect()

"""``offload_optimizer.super_offload``: buckets are stepped while backward runs, and no bit of training changes."""

import pytest
import torch

import deepspeed
from harness import on_ranks
from models import seeded
from refusals import refused
from runs import DTYPES, equal_bits, everything, identical, take_step, weights
from zero_models import CLIP, LR
from zero_training import Deep, loss_on, start


def make(stage, ahead, dtype="fp32", accumulate=1, norm=CLIP, optimizer="AdamW", **more):
    offload = {"device": "cpu", "pin_memory": False, "super_offload": ahead, "cpuadam_cores_perc": 0.5}
    more = {
        "gradient_clipping": norm,
        "optimizer": {"type": optimizer, "params": {"lr": LR}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero": {"reduce_bucket_size": 60, "offload_optimizer": offload},
        **DTYPES[dtype],
        **more,
    }
    return start(seeded(Deep), stage, 1, accumulate, **more)


def train(engine, rank, world, steps, accumulate=1, plain=False):
    for step in range(steps):
        for part in range(accumulate):
            loss = loss_on(engine, step, part * world + rank)
            take_step(engine, loss * (100.0 if step == 3 else 1.0), plain)
    return engine


@pytest.mark.any_device
@pytest.mark.sample("values", 5)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("optimizer", ["AdamW", "Lion", "Lamb"])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("norm", [0.0, 20.0, CLIP])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_changes_no_bit(rank, world, stage, dtype, accumulate, norm, plain, optimizer):
    if dtype == "fp16":
        pytest.importorskip("torch", minversion="2.0", reason="torch 1.13 has no fp16 on CPUs")

    def trained(ahead):
        engine = train(make(stage, ahead, dtype, accumulate, norm, optimizer), rank, world, 7, accumulate, plain)
        figures = engine.core.strategy_figures()
        if ahead:
            assert engine.super_offload() and engine.cpuadam_cores_perc() == 0.5
            if optimizer != "Lamb" and dtype != "fp16" and norm != CLIP:  # which clips in every step
                assert figures["buckets stepped ahead"] > 0, figures
                assert (figures["buckets undone"] > 0) == (norm > 0), figures
        return engine, None

    equal_bits(trained, True, False)


@pytest.mark.any_device
@on_ranks(2)
def test_gradients_that_are_dropped(rank, world):
    """Gradients that are dropped were never stepped."""
    engine = train(make(2, True), rank, world, 2)
    before = everything(engine)
    engine.backward(loss_on(engine, 9, rank))
    engine.zero_grad()
    assert identical(before, everything(engine))


@pytest.mark.parametrize("device, named", [("none", "device"), (None, "device")])
def test_it_needs_a_place(device, named):
    section = {"super_offload": True, **({"device": device} if device else {})}
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": 2, "offload_optimizer": section},
    }
    refused(Exception, named, deepspeed.initialize, model=Deep(), config=config)


@on_ranks(1)
def test_optimizers_of_others_make_their_own_steps(rank, world):
    model = Deep()
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}
    config = {"train_batch_size": 1, "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero}
    refused(
        ValueError,
        "super_offload",
        deepspeed.initialize,
        model=model,
        config=config,
        optimizer=torch.optim.AdamW(model.parameters()),
    )
    assert len(weights(make(1, True))) > 0

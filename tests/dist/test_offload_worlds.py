"""Offload where ranks are more, or differ: experts, three and four processes, fp16, and going on at another world. The
results are those of a run without it, bit by bit."""

import gc
import os

import pytest
import torch

from engine_models import after_steps, net_engine, train_engine
from harness import on_ranks, run_ranks
from moe_models import batch, moe_net
from runs import dtype_of, engine_of, everything, identical, load_into, moments, take_step
from test_offload_optimizer import files_below

pytestmark = pytest.mark.any_device
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def zero_section(folder, stage, where, **more):
    """``where``: "none", or where states rest and, after a +, where parameters do."""
    nvme = {"device": "nvme", "nvme_path": folder, "pipeline_read": True}
    states, _, params = where.partition("+")
    made = {"stage": stage, "reduce_bucket_size": 100, "stage3_param_persistence_threshold": 0, **more}
    if states == "nvme":
        made["offload_optimizer"] = nvme
    elif states != "none":
        made["offload_optimizer"] = {"device": "cpu", "pin_memory": False, "super_offload": states == "ahead"}
    if params:
        made["offload_param"] = {"device": "cpu"}
        if params == "nvme":
            made["offload_param"] = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    return made


# ---- experts ------------------------------------------------------------------------------------------------------
def experts_trained(rank, world, zero, more):
    net = moe_net(rank % 2, 4, 2, 2, True, False)
    made = {
        "train_batch_size": 16 * world,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "zero_optimization": zero,
        **more,
    }
    engine = engine_of(net, made)
    losses = [take_step(engine, engine(batch(step, rank).to(dtype_of(engine)))) for step in range(6)]
    found = moments(engine, engine.optimizer.state_names()).values()
    engine.destroy()
    return [torch.tensor(losses, dtype=torch.float64), *(tensor for tensors in found for tensor in tensors)]


@pytest.mark.parametrize(
    "world, stage, places, more",
    [
        (4, 2, ["ahead", "nvme"], {}),
        (2, 3, ["cpu+cpu", "nvme+nvme"], {"bf16": {"enabled": True}}),
    ],
)
@on_ranks(init=True)
def test_experts_are_offloaded_as_they_are(rank, world, stage, places, more, folder):
    plain = experts_trained(rank, world, zero_section(folder, stage, "none"), more)
    for where in places:
        assert identical(plain, experts_trained(rank, world, zero_section(folder, stage, where), more)), where


# ---- worlds, types ------------------------------------------------------------------------------------------------
def trained(rank, world, zero, steps=3, start=0, load=None, save=None, **more):
    engine = net_engine(world, size=12, zero=zero, **more)
    if load is not None:
        engine.load_checkpoint(load, tag="t")
    losses, _ = train_engine(engine, steps, rank, world, start=start, size=12)
    found = [*everything(engine), torch.tensor(losses)]
    if save is not None:
        engine.save_checkpoint(save, tag="t")
    engine.destroy()
    return found


def assert_no_bit_changes(rank, world, folder, cases, more):
    for stage, where in cases:
        plain, there = (trained(rank, world, zero_section(folder, stage, one), **more) for one in ("none", where))
        assert identical(plain, there), (stage, where)


@pytest.mark.parametrize("world, cases", [(3, [(1, "cpu"), (3, "nvme+cpu")]), (4, [(2, "nvme"), (3, "ahead+nvme")])])
@on_ranks(init=True)
def test_three_and_four_processes(rank, world, cases, folder):
    assert_no_bit_changes(rank, world, folder, cases, {"bf16": {"enabled": True}})
    gc.collect()  # files go with the parameters, which a circle of Python objects may hold
    torch.distributed.barrier()
    assert not files_below(folder)


@on_ranks(2, init=True)
def test_fp16(rank, world, folder):
    pytest.importorskip("torch", minversion="2.0", reason="torch 1.13 has no fp16 on CPUs")
    assert_no_bit_changes(rank, world, folder, [(2, "cpu"), (3, "nvme+nvme"), (3, "none+cpu")], FP16)


# ---- another world ------------------------------------------------------------------------------------------------
def body_save(rank, world, folder, stage, where):
    os.makedirs(f"{folder}/drive", exist_ok=True)
    trained(rank, world, zero_section(f"{folder}/drive", stage, where), save=folder)


def body_resume(rank, world, folder, cases):
    """As the same checkpoint into a run without offload."""
    for stage, where in cases:
        plain = trained(rank, world, zero_section(folder, stage, "none"), 1, 3, folder)
        there = trained(rank, world, zero_section(f"{folder}/drive", stage, where), 1, 3, folder)
        assert identical(plain, there), (stage, where)


def test_going_on_at_another_world(tmp_path):
    run_ranks(2, body_save, str(tmp_path), 3, "nvme+nvme", init=True)
    for world, cases in ((1, [(1, "nvme")]), (3, [(2, "ahead"), (3, "cpu+nvme")])):
        run_ranks(world, body_resume, str(tmp_path), cases, init=True)


def zenflow_engine(world, folder, stage):
    flow = {"topk_ratio": 0.25, "update_interval": 4, "select_strategy": "step", "select_interval": 8}
    zero = zero_section(folder, stage, "cpu", zenflow={**flow, "overlap_step": True})
    return net_engine(world, size=12, zero=zero)


def body_interval(rank, world, folder, stage):
    engine = after_steps(zenflow_engine(world, folder, stage), 6, rank, world, size=12)
    engine.save_checkpoint(folder, tag="t")
    train_engine(engine, 3, rank, world, start=6, size=12)
    return everything(engine)


def body_next_interval(rank, world, folder, stage):
    engine = after_steps(
        load_into(zenflow_engine(world, folder, stage), folder, tag="t"), 3, rank, world, start=6, size=12
    )
    return everything(engine)


def test_zenflow_goes_on_inside_an_interval_at_another_world(tmp_path):
    """Sums over other ranks differ in their last bits."""
    wanted = run_ranks(2, body_interval, str(tmp_path), 2, init=True)[0]
    for world, stage in ((3, 3), (1, 1)):
        found = run_ranks(world, body_next_interval, str(tmp_path), stage, init=True)[0]
        for a, b in zip(wanted, found, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

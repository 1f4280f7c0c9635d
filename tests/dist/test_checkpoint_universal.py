"""Universal checkpoints: any number of ranks, stage and precision saves, any other goes on from the converted folder."""

import os
from types import SimpleNamespace

import pytest
import torch

import deepspeed
import peer_model
from deepspeed.checkpoint.ds_to_universal import main as convert
from engine_models import batch, config, loss_of, make_net
from harness import run_ranks
from test_checkpoint import PRECISIONS
from test_checkpoint_peer import expectation

SIZE = 12  # of a batch: 1, 2, 3 and 4 ranks share it evenly
KINDS = ("exp_avg", "exp_avg_sq")


def make_engine(world, stage, precision, seed=0, optimizer=None, **more):
    made = config(
        world,
        1,
        size=SIZE,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        zero_optimization={
            "stage": stage,
            "reduce_bucket_size": 300,
            "stage3_param_persistence_threshold": 20,
            "sub_group_size": 400,
        },
        **precision,
        **more,
    )
    if optimizer is not None:
        del made["optimizer"]
        made["zero_allow_untested_optimizer"] = True
    return deepspeed.initialize(model=make_net(seed=seed), optimizer=optimizer, config=made)[0]


def train(engine, rank, world, first, steps):
    """Mean losses of the whole batch, the same whatever the number of ranks."""
    seen = []
    for step in range(first, first + steps):
        tokens, targets = (part.chunk(world)[rank] for part in batch(step, SIZE))
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        total = loss.detach().double().clone()
        if world > 1:
            torch.distributed.all_reduce(total)
        seen.append(float(total) / world)
    return seen


def states(engine):
    """name -> weight, and of trained parameters master, moments and step."""
    found = {}
    for index, (name, param) in enumerate(engine.module.named_parameters()):
        with deepspeed.zero.GatheredParameters([param]):
            found[name, "lp"] = param.detach().clone()
        if param.requires_grad:
            found[name, "fp32"] = deepspeed.utils.safe_get_full_fp32_param(param)
            for kind in engine.stepping.core.slot_names():
                found[name, kind] = deepspeed.utils.safe_get_full_optimizer_state(param, kind)
    steps = dict(zip(engine.stepping.names, engine.stepping.core.steps().tolist()))
    return found, steps, engine.get_lr(), engine.global_steps


def body_save(rank, world, folder, stage, precision):
    engine = make_engine(world, stage, precision)
    train(engine, rank, world, 0, 3)
    engine.save_checkpoint(folder, tag="t", client_state={"epoch": 3})
    saved = states(engine)
    losses = train(engine, rank, world, 3, 2)
    engine.destroy()
    return saved, losses


def body_load(rank, world, folder, stage, precision, tag=None):
    engine = make_engine(world, stage, precision, seed=5, checkpoint={"load_universal": True})
    path, client_state = engine.load_checkpoint(folder, tag=tag)
    assert os.path.dirname(path) == os.path.join(folder, "universal")
    assert client_state["epoch"] == 3
    loaded = states(engine)
    losses = train(engine, rank, world, 3, 2)
    engine.destroy()
    return loaded, losses


def to_universal(folder, tag="t", **options):
    convert(
        SimpleNamespace(
            input_folder=os.path.join(folder, tag),
            output_folder=os.path.join(folder, "universal"),
            **{"num_extract_workers": 1, "num_merge_workers": 1, **options},
        )
    )


def check_same(saved, loaded):
    for key, value in saved[0].items():
        assert value.dtype == loaded[0][key].dtype and torch.equal(value, loaded[0][key]), key
    assert saved[0].keys() == loaded[0].keys()
    assert saved[1:] == loaded[1:]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_four_ranks_of_stage_2_go_on_as_others(precision, tmp_path):
    saved, losses = run_ranks(4, body_save, str(tmp_path), 2, PRECISIONS[precision])[0]
    to_universal(tmp_path)
    assert (tmp_path / "latest_universal").read_text() == "universal"
    for world, stage in [(2, 3), (1, 1), (3, 2), (2, 0)]:
        loaded, resumed = run_ranks(world, body_load, str(tmp_path), stage, PRECISIONS[precision])[0]
        check_same(saved, loaded)
        assert resumed[0] == pytest.approx(losses[0], abs=1e-6), (world, stage)
        assert resumed[1] == pytest.approx(losses[1], abs=1e-6 if precision == "fp32" else 1e-3), (world, stage)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_stage_converts(stage, tmp_path):
    world = 3 if stage == 3 else 2
    saved, losses = run_ranks(world, body_save, str(tmp_path), stage, PRECISIONS["bf16"])[0]
    to_universal(tmp_path, num_extract_workers=2 if stage == 3 else 1)
    for to_world, to_stage in [(1, 2), (2, 3)]:
        loaded, resumed = run_ranks(to_world, body_load, str(tmp_path), to_stage, PRECISIONS["bf16"])[0]
        check_same(saved, loaded)
        assert resumed[0] == pytest.approx(losses[0], abs=1e-6)

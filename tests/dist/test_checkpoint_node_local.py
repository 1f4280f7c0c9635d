"""Every node a disk of its own: what a node lacks for loading comes from the others."""

import os

import pytest

import deepspeed
from deepspeed.checkpoint.read import verify
from engine_models import batch, config, loss_of, make_net
from harness import run_ranks


def start(world, stage):
    made = config(world, zero_optimization={"stage": stage}, checkpoint={"use_node_local_storage": True})
    return deepspeed.initialize(model=make_net(seed=0), config=made)[0]


def train(engine, steps):
    losses = []
    for step in range(steps):
        tokens, targets = batch(step)
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def body(rank, world, folder, saved_stage, loaded_stage):
    os.environ["CROSS_RANK"] = str(rank // 2)  # two nodes of two ranks
    disk = os.path.join(folder, f"disk{rank // 2}")
    engine = start(world, saved_stage)
    train(engine, 2)
    engine.save_checkpoint(disk)
    straight = train(engine, 2)
    files = sorted(verify.read(os.path.join(disk, "global_step2"))["files"])
    assert verify.verify_folder(os.path.join(disk, "global_step2")) == []
    engine = start(world, loaded_stage)
    path, _ = engine.load_checkpoint(disk)
    assert path.startswith(disk)
    return files, sorted(os.listdir(disk)), straight == train(engine, 2)


@pytest.mark.parametrize("saved, loaded", [(0, 0), (2, 2), (3, 3), (3, 1)])
def test_every_node_its_own_disk(saved, loaded, tmp_path):
    results = run_ranks(4, body, str(tmp_path), saved, loaded)
    for rank, (files, entries, equal) in enumerate(results):
        node = rank // 2
        assert entries == ["global_step2", "latest"] + ["zero_to_fp32.py"] * (saved > 0)
        own = [f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (2 * node, 2 * node + 1)] if saved else []
        assert [name for name in files if "optim_states" in name] == own
        assert equal or saved != loaded

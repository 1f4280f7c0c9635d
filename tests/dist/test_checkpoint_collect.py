"""An error of one rank while a checkpoint is collected or loaded is an error on all ranks, which names the rank; no
rank waits for the others, and no hidden folder is left."""

import os
import pathlib
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.checkpoint.save import save
from deepspeed.checkpoint.write import background
from engine_models import config, loss_on, make_net
from harness import on_ranks
from runs import engine_of, raised, take_step, together


class Schedule:
    """A scheduler of somebody else, whose ``state_dict`` or ``load_state_dict`` raises when it is told to."""

    def __init__(self, optimizer):
        self.optimizer, self.fails, self.steps = optimizer, False, 0

    def step(self, *args):
        self.steps += 1

    def state_dict(self):
        if self.fails:
            raise KeyError("a value of the schedule")
        return {"steps": self.steps}

    def load_state_dict(self, state):
        if self.fails:
            raise KeyError("a value of the schedule")
        self.steps = state["steps"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.fails = make_net(seed=0), False

    def forward(self, *args, **kwargs):
        return self.net(*args, **kwargs)

    def get_extra_state(self):
        if self.fails:
            raise ZeroDivisionError("an extra state")
        return torch.zeros(1)

    def set_extra_state(self, state):
        pass


def make_engine(world, stage, checkpoint):
    made = config(world, 1, zero_optimization={"stage": stage}, checkpoint=checkpoint)
    return engine_of(Net(), made, lr_scheduler=Schedule)


def failing_file(kind, rank):
    """A context in which ``save.run_states`` (a value that every rank makes) raises on one rank."""
    original = save.run_states

    def states(run):
        if run.ranks.rank == rank:
            raise kind("the generator is gone")
        return original(run)

    return mock.patch.object(save, "run_states", states)


@pytest.mark.sample("values")
@pytest.mark.parametrize(
    "checkpoint", [{}, {"async": True}, {"write_in_place": True}], ids=["now", "async", "in place"]
)
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2, init=True)
def test_what_raises_on_one_rank_is_an_error_on_all(rank, world, stage, checkpoint, folder):
    engine = make_engine(world, stage, checkpoint)
    take_step(engine, loss_on(engine, 0, rank=rank, world=world))
    engine.save_checkpoint(folder, tag="good")
    engine.checkpoint_engine.wait()
    background.drain_all()
    deepspeed.comm.barrier()
    before = sorted(os.listdir(folder))
    found = {}
    for bad in range(world):
        if bad == 0 or stage == 3:  # below, rank 0 alone writes the model file, and nobody else's state is asked for
            engine.lr_scheduler.fails = rank == bad
            found[f"schedule {bad}"] = raised(engine.save_checkpoint, folder, tag="bad")
            engine.lr_scheduler.fails = False
            engine.module.fails = rank == bad
            found[f"module {bad}"] = raised(engine.save_checkpoint, folder, tag="bad")
            engine.module.fails = False
        with failing_file(OSError if bad else RuntimeError, bad):
            found[f"value {bad}"] = raised(engine.save_checkpoint, folder, tag="bad")
        client = {"checkpoint_parallel_dimensions" if rank == bad else "fine": 1}
        found[f"client {bad}"] = raised(engine.save_checkpoint, folder, tag="bad", client_state=client)
        deepspeed.comm.barrier()
        assert sorted(os.listdir(folder)) == before
    engine.save_checkpoint(folder, tag="after")
    engine.checkpoint_engine.wait()
    deepspeed.comm.barrier()
    assert engine.load_checkpoint(folder, tag="after")[0] is not None
    told = together(found)
    words = {"schedule": "a value of the schedule", "module": "an extra state", "value": "the generator is gone"}
    for what in told[0]:
        kind, bad = what.split()
        for rank, found in enumerate(told):
            assert found[what] is not None, (what, rank)
            name, text = found[what]
            if kind == "client":
                assert "checkpoint_parallel_dimensions" in text or f"rank {bad}" in text, text
                continue
            assert f"rank {bad}: " in text and words[kind] in text, (what, rank, name, text)


@on_ranks(2, init=True)
def test_what_raises_on_one_rank_while_loading(rank, world, folder):
    engine = make_engine(world, 1, {})
    engine.save_checkpoint(folder)
    engine.lr_scheduler.fails = rank == 1
    found = [raised(engine.load_checkpoint, folder)]
    engine.lr_scheduler.fails = False
    assert engine.load_checkpoint(folder)[0] is not None
    # One rank's disk has another `latest`, or none.
    own = os.path.join(folder, "own") if rank else folder
    os.makedirs(own, exist_ok=True)
    found.append(raised(engine.load_checkpoint, own))
    if rank:
        pathlib.Path(own, "latest").write_text("../../elsewhere")
    found.append(raised(engine.load_checkpoint, own))
    told = together(found)
    assert told[1][0][0] == "KeyError" and "rank 1: KeyError" in told[0][0][1], told
    assert all("rank 1 sees no checkpoint" in found[1][1] for found in told), told
    assert told[1][2][0] == "ValueError" and "latest has the name '../../elsewhere'" in told[1][2][1], told
    assert "rank 1: ValueError" in told[0][2][1], told

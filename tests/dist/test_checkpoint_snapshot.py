"""Calls that change an engine's states wait while a checkpoint copies them."""

import threading
import time
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.checkpoint.engines.built_in import AsyncCheckpointEngine
from deepspeed.checkpoint.save.contents import HeldStates
from deepspeed.checkpoint.write import snapshot as snapshots
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from harness import on_ranks
from refusals import refused
from runs import KEEP_GATHERED, dtype_of, engine_of, settings
from runs import train as train_on


def make_engine(stage=2, bf16=True, client_optimizer=False):
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    client = torch.optim.AdamW(model.parameters(), lr=0.1) if client_optimizer else None
    return engine_of(model, settings(stage, dtype="bf16" if bf16 else "fp32", rate=0.1, zero=KEEP_GATHERED), client)


def train(engine, steps=1):
    like = {"dtype": dtype_of(engine), "device": engine.device}
    train_on(engine, lambda step, _: engine(torch.full((2, 8), 0.1 * (step + 1), **like)).square().mean(), steps)


def meets(function):
    """Whether ``function()`` ends within 0.2 s; it goes on in its thread otherwise."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(0.2)
    return thread, not thread.is_alive()


def gather_and_write(weight):
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.add_(1)


@pytest.mark.any_device
@pytest.mark.sample("values")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("client_optimizer", [False, True])
@on_ranks(1)
def test_what_changes_states_waits_for_the_copies(rank, world, stage, client_optimizer):
    engine = make_engine(stage, client_optimizer=client_optimizer)
    train(engine)
    weight = engine.module[0].weight
    name = "exp_avg"
    one = torch.ones_like(safe_get_full_fp32_param(weight))
    saved = engine.optimizer.state_dict()
    writes = {
        "step": lambda: train(engine),
        "masters": lambda: safe_set_full_fp32_param(weight, one),
        "states": lambda: safe_set_full_optimizer_state(weight, one, name),
        "handed out": lambda: engine.core.masters(),
        "loaded": lambda: engine.optimizer.load_state_dict(saved),
    }
    if stage == 3:
        writes["gathered"] = lambda: gather_and_write(weight)
    for what, write in writes.items():
        engine.core.hold_states()
        try:
            thread, ended = meets(write)
            assert not ended, what
        finally:
            engine.core.release_states()
            thread.join(10)
        assert not thread.is_alive(), what
    engine.core.hold_states()
    assert meets(lambda: safe_get_full_optimizer_state(weight, name))[1] or client_optimizer
    engine.core.release_states()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
@on_ranks(1)
def test_which_memory_is_the_engines_own(rank, world, stage, bf16):
    engine = make_engine(stage, bf16)
    train(engine)
    states = HeldStates(engine._checkpoints.run_state())

    def covered(tensor):
        return states.cover(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    assert all(covered(tensor) for slot in range(2) for tensor in engine.core.slots(slot))
    own_masters = bf16  # else they are the weights
    assert all(covered(tensor) == own_masters for tensor in engine.core.masters())
    assert not any(covered(param) for param in engine.module.parameters() if param.numel())
    engine.core.slots(0)[0].add_(1)
    refused(RuntimeError, "checkpoint_engine.wait", states.check_unchanged)


def slow_copies():
    made = snapshots._copy
    return mock.patch.object(snapshots, "_copy", lambda *args: (time.sleep(0.2), made(*args)))


@pytest.mark.any_device
@on_ranks(1)
def test_a_step_between_does_not_reach_the_file(rank, world, folder):
    engine = make_engine()
    engine.checkpoint_engine = AsyncCheckpointEngine()
    train(engine, 2)
    weight = engine.module[0].weight
    expected = [safe_get_full_fp32_param(weight).clone(), safe_get_full_optimizer_state(weight, "exp_avg").clone()]
    with slow_copies():
        engine.save_checkpoint(folder)
        train(engine, 2)  # the first of them waits
        engine.load_checkpoint(folder)
    found = [safe_get_full_fp32_param(weight), safe_get_full_optimizer_state(weight, "exp_avg")]
    assert all(torch.equal(one, other) for one, other in zip(expected, found))


@on_ranks(1)
def test_states_that_somebody_else_writes_to_are_told(rank, world, folder, tmp_path):
    engine = make_engine()
    engine.checkpoint_engine = AsyncCheckpointEngine()
    train(engine)
    engine.save_checkpoint(folder, tag="good")
    engine.checkpoint_engine.wait()
    moment = next(iter(engine.basic_optimizer.state.values()))["exp_avg"]
    with slow_copies():
        engine.save_checkpoint(folder, tag="torn")
        moment.zero_()
        refused(RuntimeError, "torn.*written to, by other means", engine.checkpoint_engine.wait)
    assert (tmp_path / "latest").read_text() == "good" and not (tmp_path / "torn").exists()

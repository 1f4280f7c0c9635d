"""Hooks of the parts of engines: a file adds a part, each hook runs once for each step, and the way to the core."""

import contextlib
import itertools
import os
import sys

import pytest
import torch

import deepspeed
import pipe_models as models
from deepspeed.engine.members import HOOKS, engine_parts, member
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from engine_models import config, loss_on, make_net
from harness import on_ranks
from refusals import refused
from runs import together

STEPS, MICRO = 3, 2
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
KINDS = [("plain", 0, 1, {}), ("plain", 2, MICRO, {}), ("plain", 3, 1, OFFLOADED), ("pipeline", 0, MICRO, {})]


def add_part():
    """A part like that of a new file in ``deepspeed/engine/parts``."""

    @engine_parts.add("_told")
    class Told:
        def __init__(self, engine):
            self.engine, self.calls = engine, []

        @member
        def hooks_told(self):
            """Hooks in their order."""
            return [name for name, _ in self.calls]

        def __getattr__(self, name):
            if name not in HOOKS:
                raise AttributeError(name)
            if name == "effective_tokens":
                return lambda tokens: tokens
            if name in ("see_inputs", "see_loss"):  # tensors, which are not compared
                return lambda *args: self.calls.append((name, (len(args), self.engine.global_steps)))
            return lambda *args: self.calls.append((name, (*args, self.engine.global_steps)))

    return Told


PASSES = {0: "forward forward backward backward", 1: "forward backward forward backward"}  # of each stage, MICRO is 2


def expected(kind, accumulate, rank):
    calls, forwards = [], itertools.count(1)

    def one(step):
        inputs = [("add_keywords", ({}, step)), ("see_inputs", (2, step)), ("around", ("forward", step))]
        inputs += [("forwarded", (next(forwards), step)), ("see_loss", (2, step)), ("around", ("backward", step))]
        return [("around", (phase, step)) for phase in PASSES[rank].split()] if kind == "pipeline" else inputs

    for step in range(STEPS):
        for _ in range(accumulate - 1 if kind == "plain" else 0):
            calls += [*one(step), ("before_micro_step", (False, step)), ("after_micro_step", (False, step))]
        calls += [*one(step), ("before_micro_step", (True, step)), ("before_step", (step,))]
        calls += [("after_micro_step", (True, step + 1)), ("after_step", (step + 1,))]
    return calls


@pytest.mark.parametrize("kind, stage, accumulate, zero", KINDS)
@on_ranks(2, init=True, fresh=True)
def test_a_part_from_another_file_hears_of_each_hook_once(rank, world, kind, stage, accumulate, zero, folder):
    part = add_part()
    if kind == "pipeline":
        engine = models.engine_of("plain", world, world, accumulate, stage)
        data = models.batches("plain", STEPS, accumulate, 0)
    else:
        options = {"zero_optimization": {"stage": stage, **zero}}
        engine = deepspeed.initialize(model=make_net(), config=config(world, accumulate, **options))[0]
    assert type(engine._told) is part and engine.hooks_told() == ["start"]
    engine._told.calls.clear()
    for step in range(STEPS):
        if kind == "pipeline":
            engine.train_batch(data)
            continue
        for _ in range(accumulate):
            engine.backward(loss_on(engine, step))
            engine.step()
    calls = list(engine._told.calls)
    engine._told.calls.clear()
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    engine.destroy()
    for number, (told, others) in enumerate(together(calls, engine.hooks_told())):
        assert told == expected(kind, accumulate, number)
        assert others == ["before_save", "after_load", "stop"]


class Failing(torch.optim.lr_scheduler.StepLR):
    """A schedule that raises."""

    def step(self, *args, **kwargs):
        if getattr(self, "fails", False):
            raise RuntimeError("this schedule fails")
        super().step(*args, **kwargs)


@on_ranks(1, init=True, fresh=True)
def test_a_step_that_raises(rank, world):
    add_part()
    made = config(world, 1, zero_optimization={"stage": 1})
    engine = deepspeed.initialize(model=make_net(), config=made, lr_scheduler=lambda it: Failing(it, 1))[0]
    engine.backward(loss_on(engine, 0))
    engine._told.calls.clear()
    engine.lr_scheduler.fails = True
    refused(RuntimeError, "this schedule fails", engine.step)
    assert engine.hooks_told() == ["before_micro_step", "before_step", "failed", "failed_step"]


class Refusing(torch.nn.Module):
    """A model that raises an error where it is asked to."""

    def __init__(self):
        super().__init__()
        self.layer, self.fails = torch.nn.Linear(4, 4), False

    def forward(self, x):
        if self.fails:
            raise ValueError("this model fails")
        return self.layer(x)


@on_ranks(1, init=True, fresh=True)
def test_contexts_of_parts_are_around_forward_and_backward(rank, world):
    @engine_parts.add("_around")
    class Around:
        def __init__(self, engine):
            self.events = []

        @contextlib.contextmanager
        def around(self, phase):
            self.events.append(f"{phase} begins")
            try:
                yield
            finally:
                self.events.append(f"{phase} ends")

        def failed(self, error):
            self.events.append(str(error))

    net = Refusing()
    engine = deepspeed.initialize(model=net, config=config(world, 1))[0]
    out = engine(torch.ones(1, 4))
    out.register_hook(lambda grad: engine._around.events.append("gradient"))
    assert engine._around.events == ["forward begins", "forward ends"]
    engine.backward(out.sum())
    assert engine._around.events[2:] == ["backward begins", "gradient", "backward ends"]
    engine.step()
    engine._around.events.clear()
    net.fails = True
    refused(ValueError, "this model fails", engine, torch.ones(1, 4))
    assert engine._around.events == ["forward begins", "forward ends", "this model fails"]


# ---- the way to the core ---------------------------------------------------------------------------------------------

OWN = os.path.dirname(deepspeed.__file__)


class Watched:
    """A core that keeps the functions of this library which were running when its step was called."""

    def __init__(self, inner):
        self.inner, self.ways = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, inputs):
        frame, way = sys._getframe(1), []
        while frame.f_code.co_name != "test_the_way_to_the_core":
            if frame.f_code.co_filename.startswith(OWN):
                way.insert(0, frame.f_code.co_name)
            frame = frame.f_back
        self.ways.append(way)
        return self.inner.step(inputs)


OPTIMIZERS = {
    "cpu": DeepSpeedCPUAdam,
    "fused": FusedAdam,
    "lamb": FusedLamb,
    "torch": lambda params: torch.optim.SGD(params, 0.1),
}


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, init=True)
def test_the_way_to_the_core(rank, world, stage, name):
    net = make_net()
    made = config(world, 1, zero_optimization={"stage": stage}, zero_allow_untested_optimizer=True)
    del made["optimizer"]
    engine = deepspeed.initialize(model=net, optimizer=OPTIMIZERS[name](net.parameters()), config=made)[0]
    engine.backward(loss_on(engine, 0))
    engine.stepping.core = core = Watched(engine.stepping.core)
    seen, step = [], engine.basic_optimizer.step
    engine.basic_optimizer.step = lambda: seen.append(1) or step()  # as clients do
    engine.step()
    assert seen == [1] and engine.was_step_applied()
    ways = list(core.ways)
    if name != "torch":
        engine.basic_optimizer.step = lambda: None
        engine.backward(loss_on(engine, 0))
        refused(RuntimeError, r"\.step\(\) was replaced by one that makes no update", engine.step)
        assert engine.global_steps == 1 and core.ways == ways
        engine.basic_optimizer.step = step
        step()  # a step of the engine that changes no counters
        assert len(core.ways) == 2 and engine.global_steps == 1
    [way] = ways
    assert way[0] == "method" and len(way) <= 4, way

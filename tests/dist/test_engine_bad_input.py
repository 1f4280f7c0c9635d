"""Mistakes of users: one paragraph that names the thing and the fix, at once, on every rank."""

import argparse
import pathlib

import pytest
import torch

import deepspeed
from engine_models import batch, config, loss_of, make_net
from harness import on_ranks, run_ranks
from models import Parts, seeded
from refusals import refused
from runs import engine_of, take_step


def initialize(**given):
    """Calls ``deepspeed.initialize`` with a model and a configuration that are right where ``given`` has no other."""
    return deepspeed.initialize(**{"model": make_net(), "config": config(), **given})


def malformed():
    pathlib.Path("broken.json").write_text('{"train_batch_size": 8,, }')
    return initialize(config="broken.json")


def twice():
    net = make_net()
    p = next(net.parameters())
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.param_groups[0]["params"].append(p)
    return initialize(model=net, optimizer=optimizer)


def without_optimizer():
    engine = engine_of(make_net(), {name: value for name, value in config().items() if name != "optimizer"})
    return engine.backward(engine(batch(0)[0]).sum())


def step_in_no_sync(engine, tokens, targets):
    with engine.no_sync():
        engine.backward(loss_of(engine(tokens), targets))
        return engine.step()


def no_sync_twice(engine, tokens, targets):
    with engine.no_sync(), engine.no_sync():
        pass


ADAM, REFUSED = config()["optimizer"], deepspeed.DeepSpeedConfigError
# what -> the error, words in its text, and what makes it
STARTS = {
    "no model": (AssertionError, "needs a model", lambda: deepspeed.initialize(config=config())),
    "no config": (AssertionError, "no DeepSpeed configuration", lambda: deepspeed.initialize(model=make_net())),
    "no file": ((ValueError, FileNotFoundError), "/nowhere/ds.json", lambda: initialize(config="/nowhere/ds.json")),
    "malformed": (ValueError, "broken.json", malformed),
    "two configs": (
        AssertionError, "more than once: config and args.deepspeed_config",
        lambda: initialize(args=argparse.Namespace(deepspeed_config="a.json")),
    ),
    "optimizer name": (
        REFUSED, "AdamX.*(Adam|AdamW)", lambda: initialize(config=config(optimizer={**ADAM, "type": "AdamX"})),
    ),
    "optimizer params": (
        REFUSED, "momentun",
        lambda: initialize(config=config(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentun": 0.9}})),
    ),
    "max_grad_norm": (
        ValueError, "gradient_clipping",
        lambda: initialize(config=config(optimizer={**ADAM, "params": {**ADAM["params"], "max_grad_norm": 1.0}})),
    ),
    "scheduler name": (
        REFUSED, "WarmupLRR.*WarmupLR",
        lambda: initialize(config=config(scheduler={"type": "WarmupLRR", "params": {}})),
    ),
    "batch": (AssertionError, "7", lambda: initialize(config=config(train_batch_size=7))),
    "stage": (
        (ValueError, AssertionError), "stage",
        lambda: initialize(config=config(zero_optimization={"stage": 4, "reduce_bucket_size": 300})),
    ),
    "optimizer object": (TypeError, "is a str", lambda: initialize(optimizer="adam")),
    "frozen": (ValueError, "nothing to optimise", lambda: initialize(model=make_net().requires_grad_(False))),
    "mesh": (REFUSED, r"mesh_param = \(2, 1\) makes 2 ranks, but there are 1", lambda: initialize(mesh_param=(2, 1))),
    "mesh and mpu": (ValueError, "pass one of them", lambda: initialize(mesh_param=(1, 1), mpu=object())),
    "twice": (ValueError, "appears twice", twice),
    "no optimizer": (AssertionError, "needs an optimizer", without_optimizer),
}  # fmt: skip
# The same with an engine, and a batch for it.
CALLS = {
    "not scalar": (
        AssertionError, r"scalar loss, got shape \(8, 6, 5\)",
        lambda engine, tokens, targets: engine.backward(engine(tokens)),
    ),
    "not a tensor": (
        TypeError, "not loss.item",
        lambda engine, tokens, targets: engine.backward(loss_of(engine(tokens), targets).item()),
    ),
    "step in no_sync": (AssertionError, "no_sync", step_in_no_sync),
    "no_sync twice": (AssertionError, "entered twice", no_sync_twice),
    "train batch": (ValueError, "not divisible", lambda engine, tokens, targets: engine.set_train_batch_size(9)),
    "data": (ValueError, "is a int", lambda engine, tokens, targets: engine.deepspeed_io(7)),
}  # fmt: skip


def body(rank, world, what):
    return STARTS[what][2]() if what in STARTS else CALLS[what][2](engine_of(make_net(), config()), *batch(0))


@pytest.mark.parametrize("what", [*STARTS, *CALLS])
def test_bad_input_is_explained(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error, words, _ = (STARTS | CALLS)[what]
    refused(error, "(?s)" + words, run_ranks, 1, body, what)


@on_ranks(1)
def test_a_failed_backward_leaves_no_state_behind(rank, world):
    """A backward that fails leaves nothing: the next ones train as if it had not been."""

    class Fragile(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, fail):
            ctx.fail = fail
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.fail:
                raise RuntimeError("this backward fails on purpose")
            return grad, None

    def model():
        return Parts(
            lambda net, x, fail=False: net.late(Fragile.apply(net.early(x), fail)).square().mean(),
            early=torch.nn.Linear(3, 3),
            late=torch.nn.Linear(3, 3),
        )

    models = [seeded(model), seeded(model)]
    engines = [engine_of(m, config(world)) for m in models]
    for step in range(4):
        x = torch.full((2, 3), float(step + rank))
        for user in (False, True):
            loss = engines[0](x * 3, fail=True)
            refused(RuntimeError, "on purpose", *((loss.backward,) if user else (engines[0].backward, loss)))
        for engine in engines:
            take_step(engine, engine(x))
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))

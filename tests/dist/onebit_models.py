"""A small model for optimizers whose ranks exchange signs, and engines that train it on other data on each rank."""

import torch

from models import Parts, seeded
from runs import engine_of, settings, take_step

FREEZE = {"freeze_step": 3}
LOCAL = {"var_freeze_step": 3, "var_update_scaler": 2, "local_step_scaler": 1, "local_step_clipper": 4}
KINDS = {"OneBitAdam": FREEZE, "OneBitLamb": FREEZE, "ZeroOneAdam": LOCAL}


def make():
    """Matrices, vectors, an empty parameter, a frozen one, one that is never used, and a shared one."""
    net = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    net.empty = torch.nn.Parameter(torch.zeros(0))
    net.unused = torch.nn.Parameter(torch.ones(3))
    net.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    net[2].again = net[2].weight
    return net


def element_wise():
    """The same without matrix products, which some CPUs lack in fp16."""
    return Parts(
        lambda net, x: (x * net.a + net.b)[:, :4],
        a=torch.nn.Parameter(torch.rand(12) - 0.5),
        b=torch.nn.Parameter(torch.rand(12)),
        empty=torch.nn.Parameter(torch.zeros(0)),
        unused=torch.nn.Parameter(torch.ones(3)),
        frozen=torch.nn.Parameter(torch.ones(4), requires_grad=False),
    )


def section(kind, **params):
    return {"type": kind, "params": {"lr": 0.01, **KINDS[kind], **params}}


def start(kind, dtype="fp32", seed=0, params=(), empty=True, **more):
    """An engine in ``dtype``. ``params``: more parameters of the optimizer. ``empty``: the model has one without
    elements."""
    if dtype == "fp16":
        more = {"fp16": {"enabled": True, "initial_scale_power": 8}, **more}
    made = settings(0, rows=4, dtype=dtype, optimizer=section(kind, **dict(params)), **more)
    net = seeded(element_wise if dtype == "fp16" else make, seed=seed)
    if not empty:
        del net.empty
    return engine_of(net, made, model_parameters=[p for p in net.parameters() if p.requires_grad])


def loss_on(engine, rank, step, micro=0):
    drawn = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    x = torch.randn(4, 12, generator=drawn).to(engine.device, next(engine.module.parameters()).dtype)
    return (engine(x) - x[:, :4] * 2).float().square().mean()


def train(engine, rank, steps, first=0):
    """Trains some steps and returns the losses."""
    return [
        take_step(engine, loss_on(engine, rank, step, micro))
        for step in range(first, first + steps)
        for micro in range(engine.gradient_accumulation_steps())
    ]

"""The model, data and checkpoints of tests/data: what another implementation has trained and saved."""

import json
import os
import pathlib

import torch

from models import Parts, seeded
from runs import engine_of
from runs import train as train_on

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", "peer-checkpoints")
KINDS = [(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")]


def peer_net():
    """``c``'s weight is ``b``'s, ``f``'s is frozen; a buffer."""
    net = Parts(
        lambda net, x: net.o(net.n(net.f(torch.tanh(net.c(torch.tanh(net.b(torch.tanh(net.a(x))))))))),
        a=torch.nn.Linear(7, 13),
        b=torch.nn.Linear(13, 13, bias=False),
        c=torch.nn.Linear(13, 13, bias=False),
        f=torch.nn.Linear(13, 13),
        n=torch.nn.LayerNorm(13),
        o=torch.nn.Linear(13, 3),
        count=torch.arange(3.0),
    )
    net.c.weight = net.b.weight
    net.f.weight.requires_grad_(False)
    return net


def folder(stage, dtype):
    return os.path.join(FOLDER, f"stage{stage}-{dtype}-2ranks")


def what(stage, dtype):
    """The configuration, and what was seen: dict."""
    return json.loads(pathlib.Path(folder(stage, dtype), "what.json").read_text())


def make_engine(configuration, seed=0, optimizer=None, **more):
    """An engine with the two parameter groups of the peer: matrices, and the rest without weight decay."""
    net = seeded(peer_net, seed=seed)
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    made = {**configuration, **more}
    if optimizer is not None:
        return engine_of(net, made, optimizer(groups))
    return engine_of(net, made, model_parameters=groups)


def loss(engine, step, rank):
    generator = torch.Generator().manual_seed(50 + 2 * step + rank)
    x = torch.randn(2, 7, generator=generator).to(next(p for _, p in engine.module.named_parameters()).dtype)
    return engine(x).float().pow(2).mean()


def train(engine, steps, rank, first=0):
    return train_on(engine, lambda step, _: loss(engine, step, rank), steps, first)

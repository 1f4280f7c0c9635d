"""The model, data and checkpoints of tests/data: what another implementation has trained and saved."""

import json
import os

import torch

from runs import engine_of
from runs import train as train_on

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", "peer-checkpoints")
KINDS = [(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")]


class PeerNet(torch.nn.Module):
    """``c``'s weight is ``b``'s, ``f``'s is frozen; a buffer."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(7, 13)
        self.b = torch.nn.Linear(13, 13, bias=False)
        self.c = torch.nn.Linear(13, 13, bias=False)
        self.c.weight = self.b.weight
        self.f = torch.nn.Linear(13, 13)
        self.f.weight.requires_grad_(False)
        self.n = torch.nn.LayerNorm(13)
        self.o = torch.nn.Linear(13, 3)
        self.register_buffer("count", torch.arange(3.0))

    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        hidden = torch.tanh(self.b(hidden))
        return self.o(self.n(self.f(torch.tanh(self.c(hidden)))))


def folder(stage, dtype):
    return os.path.join(FOLDER, f"stage{stage}-{dtype}-2ranks")


def what(stage, dtype):
    """The configuration, and what was seen: dict."""
    with open(os.path.join(folder(stage, dtype), "what.json")) as file:
        return json.load(file)


def make_engine(configuration, seed=0, optimizer=None, **more):
    """An engine with the two parameter groups of the peer: matrices, and the rest without weight decay."""
    torch.manual_seed(seed)
    net = PeerNet()
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

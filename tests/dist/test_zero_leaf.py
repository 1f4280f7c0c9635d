"""Leaf modules in training: what goes into one must lead its backward out again."""

import torch

from deepspeed.utils import set_z3_leaf_modules
from harness import on_ranks
from models import Parts, seeded
from refusals import refused
from runs import engine_of, settings, take_step


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.each = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x, mask=None):
        return sum(expert(x) for expert in self.each) * (1 if mask is None else mask)


def net_of(experts_first):
    return Parts(
        lambda net, x: net.experts(net.lead(x), torch.ones(4)).sum(),
        lead=torch.nn.Identity() if experts_first else torch.nn.Linear(4, 4),
        experts=Experts(),
    )


@on_ranks(2)
def test_a_leaf_module_needs_an_input_with_a_gradient(rank, world):
    def start(experts_first):
        model = seeded(net_of, experts_first)
        set_z3_leaf_modules(model, [Experts])
        return engine_of(model, settings(3, rate=0.1))

    x = torch.randn(2, 4)
    engine = start(False)
    take_step(engine, engine(x))
    engine = start(True)
    words = "A module cannot be set as a leaf module when it does not have any input tensors that require gradients"
    refused(RuntimeError, words + " and has parameters that require gradients.*Experts", engine, x)
    with torch.no_grad():
        engine(x)
    take_step(engine, engine(x.clone().requires_grad_()))
    engine.module.experts.requires_grad_(False)
    engine(x)

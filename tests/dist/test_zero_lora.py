"""Adapters beside frozen weights, with checkpointed activations, against one process without sharding."""

import functools

import pytest
import torch

from deepspeed.utils import safe_get_full_grad
from harness import on_ranks
from models import Parts, Recomputed
from plain import Plain
from runs import engine_of, settings

WIDTH = 16


def adapted():
    return Parts(
        lambda net, x: torch.tanh(net.base(x) + net.up(net.down(x))),
        base=torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        down=torch.nn.Linear(WIDTH, 2, bias=False),
        up=torch.nn.Linear(2, WIDTH, bias=False),
    )


def inputs(world):
    return torch.randn(2 * world, WIDTH, generator=torch.Generator().manual_seed(5)).requires_grad_()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2, init=True)
def test_adapters_with_checkpoints(rank, world, stage, reentrant):
    engine = engine_of(Recomputed(adapted, 3, reentrant), settings(stage))
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
    plain = Plain(Recomputed(adapted, 3, None), adamw, dtype=None)
    for _ in range(3):
        plain.step(plain.model(inputs(world)).square().mean())
        engine.backward(engine(inputs(world)[2 * rank : 2 * rank + 2]).square().mean())
        for name, ours in engine.module.named_parameters():
            if plain.params[name].requires_grad:
                assert torch.allclose(safe_get_full_grad(ours), plain.grads[-1][name], atol=1e-6), name
        engine.step()

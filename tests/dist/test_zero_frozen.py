"""Frozen layers of every common kind inside checkpointed segments, against one process without sharding."""

import functools

import pytest
import torch

from deepspeed.utils import safe_get_full_grad
from harness import on_ranks
from models import Parts, Recomputed
from plain import Plain
from runs import engine_of, settings

WIDTH, LENGTH, TOKENS = 8, 6, 11


def forward_frozen_layers(net, x, ids):
    x = net.layer(net.up(x) + net.embed(ids)) * net.scale
    rows = net.group(net.normed(net.transposed(net.conv(x.transpose(1, 2)))))
    x = x + net.prelu(net.batch(rows)).transpose(1, 2)
    x = net.bilinear(x, torch.tanh(x)) + net.attention(x, x, x, need_weights=False)[0]
    return torch.tanh(x + net.gru(x)[0])


def frozen_layers():
    """Every layer is frozen but ``up``; the first input may need no gradient."""
    net = Parts(
        forward_frozen_layers,
        embed=torch.nn.Embedding(TOKENS, WIDTH),
        conv=torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
        transposed=torch.nn.ConvTranspose1d(WIDTH, WIDTH, 1),
        normed=torch.nn.utils.weight_norm(torch.nn.Conv1d(WIDTH, WIDTH, 1)),
        layer=torch.nn.LayerNorm(WIDTH),
        group=torch.nn.GroupNorm(2, WIDTH),
        batch=torch.nn.BatchNorm1d(WIDTH, track_running_stats=False),
        bilinear=torch.nn.Bilinear(WIDTH, WIDTH, WIDTH),
        prelu=torch.nn.PReLU(WIDTH),
        attention=torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        scale=torch.nn.Parameter(torch.ones(WIDTH)),
        gru=torch.nn.GRU(WIDTH, WIDTH, batch_first=True),
        up=torch.nn.Linear(WIDTH, WIDTH),
    )
    net.requires_grad_(False).up.requires_grad_()
    return net


def inputs(world):
    random = torch.Generator().manual_seed(5)
    return (
        torch.randn(world, LENGTH, WIDTH, generator=random).requires_grad_(),
        torch.randint(0, TOKENS, (world, LENGTH), generator=random),
    )


@pytest.mark.parametrize("reentrant", [False, True, None])
@on_ranks(2, init=True)
def test_frozen_layers_with_checkpoints(rank, world, reentrant):
    stage = 3
    made = settings(stage, 1, optimizer="SGD", rate=0.1, gradient_clipping=0.0)
    engine = engine_of(Recomputed(frozen_layers, 2, reentrant), made)
    plain = Recomputed(frozen_layers, 2, None)  # torch does not copy layers with weight_norm
    plain = Plain(plain, functools.partial(torch.optim.SGD, lr=0.1), dtype=None, copied=False)
    x, ids = inputs(world)
    for step in range(2):
        plain.run(lambda model, step, r: model(x[r : r + 1], ids[r : r + 1]).square().mean(), [step], world)
        engine.backward(engine(x[rank : rank + 1], ids[rank : rank + 1]).square().mean())
        for name, ours in engine.module.named_parameters():
            if plain.params[name].requires_grad:
                assert torch.allclose(safe_get_full_grad(ours), plain.grads[-1][name], atol=1e-6), name
            assert stage < 3 or ours.shape == (0,), name  # nothing was kept
        engine.step()

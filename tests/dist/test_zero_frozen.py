"""Frozen layers of every common kind inside checkpointed segments, against one process without sharding."""

import pytest
import torch

from deepspeed.utils import safe_get_full_grad
from harness import on_ranks
from models import Recomputed
from runs import engine_of, settings

WIDTH, LENGTH, TOKENS = 8, 6, 11


class Block(torch.nn.Module):
    """Every layer is frozen but ``up``; the first input may need no gradient."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(TOKENS, WIDTH)
        self.conv = torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.transposed = torch.nn.ConvTranspose1d(WIDTH, WIDTH, 1)
        self.normed = torch.nn.utils.weight_norm(torch.nn.Conv1d(WIDTH, WIDTH, 1))
        self.layer = torch.nn.LayerNorm(WIDTH)
        self.group = torch.nn.GroupNorm(2, WIDTH)
        self.batch = torch.nn.BatchNorm1d(WIDTH, track_running_stats=False)
        self.bilinear = torch.nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.prelu = torch.nn.PReLU(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.gru = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.requires_grad_(False)
        self.up = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, ids):
        x = self.layer(self.up(x) + self.embed(ids)) * self.scale
        rows = self.group(self.normed(self.transposed(self.conv(x.transpose(1, 2)))))
        x = x + self.prelu(self.batch(rows)).transpose(1, 2)
        x = self.bilinear(x, torch.tanh(x)) + self.attention(x, x, x, need_weights=False)[0]
        return torch.tanh(x + self.gru(x)[0])


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
    engine = engine_of(Recomputed(Block, 2, reentrant), made)
    plain = Recomputed(Block, 2, None)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, ids = inputs(world)
    for _ in range(2):
        optimizer.zero_grad()
        sum(plain(x[r : r + 1], ids[r : r + 1]).square().mean() for r in range(world)).div(world).backward()
        engine.backward(engine(x[rank : rank + 1], ids[rank : rank + 1]).square().mean())
        for (name, ours), theirs in zip(engine.module.named_parameters(), plain.parameters()):
            if theirs.requires_grad:
                assert torch.allclose(safe_get_full_grad(ours), theirs.grad, atol=1e-6), name
            assert stage < 3 or ours.shape == (0,), name  # nothing was kept
        optimizer.step()
        engine.step()

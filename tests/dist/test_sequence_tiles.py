"""Tiles in an engine: at every stage the gradients of one process, and each bucket of gradients leaves once."""

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
from harness import on_ranks
from runs import take_step, weight_list
from sequence_models import sgd_engine, worst

WIDTH, VOCAB, LENGTH = 6, 11, 7


class Tiled(torch.nn.Module):
    """Two layers that share an MLP, and a loss; ``shards`` 0: nothing is tiled."""

    def __init__(self, shards):
        super().__init__()
        torch.manual_seed(4)
        self.shards, self.tokens = shards, torch.nn.Embedding(VOCAB, WIDTH)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, 9), torch.nn.Tanh(), torch.nn.Linear(9, WIDTH))
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, labels):
        x = self.tokens(tokens)
        for _ in range(2):
            x = x + (TiledMLP.apply(lambda mlp, y: mlp(y), self.mlp, x, self.shards) if self.shards else self.mlp(x))
        if not self.shards:
            return self.loss(x, labels)
        return TiledFusedLogitsLoss.apply(Tiled.loss, self, x, labels, None, self.shards, [self.head.weight], "mean")

    def loss(self, x, y):
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[torch.rand(2, LENGTH, generator=generator) < 0.4] = -100
    labels[0, 0] = 1
    return tokens, labels


@pytest.mark.sample("values")
@pytest.mark.parametrize("shards, accumulate", [(1, 1), (3, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2, timeout=60)
def test_training(rank, world, stage, shards, accumulate):
    plain, model = Tiled(0), Tiled(shards)
    engine = sgd_engine(model, stage, 0.5, accumulate, zero={"reduce_bucket_size": 60})
    steps = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(3):
        steps.zero_grad()
        for micro in range(accumulate):
            at = step * accumulate + micro
            take_step(engine, engine(*batch_of(at, rank)))
            for one in range(world):
                (plain(*batch_of(at, one)) / world / accumulate).backward()
        steps.step()
    gap = worst(zip(weight_list(engine), plain.parameters()))
    engine.destroy()
    dist.barrier()
    assert gap < 2e-6


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_all_tiles_are_one_use_of_a_weight_whichever_have_labels(rank, world, stage):
    engine = sgd_engine(Tiled(LENGTH), stage, 0.5, 1, zero={"reduce_bucket_size": 60})
    tokens, late = batch_of(0, rank)[0], []
    for counted in (1, 4, LENGTH, 1, 4):  # tiles
        labels = tokens.clone()
        labels[:, (counted + rank) % (LENGTH + 1) :] = -100
        take_step(engine, engine(tokens, labels))
        late.append(engine.core.late_count)  # gradients that came after their bucket had left
    engine.destroy()
    # The first step of stage 2 does not know yet that two layers share the MLP.
    assert late[1:] == [0] * 4 and (stage == 2 or late[0] == 0), late

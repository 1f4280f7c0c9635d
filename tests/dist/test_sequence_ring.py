"""Attention in a ring: outputs and gradients of one process, balanced work, keys that travel once."""

import functools

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.sequence import methods
from deepspeed.sequence.ring import Ring, ring_attention
from deepspeed.sequence.ulysses_ring import UlyssesRing
from harness import on_ranks
from refusals import refused
from sequence_models import attend, part, projections, worst


def gap_of(rank, world, heads, kv, causal, shared):
    """The largest difference of outputs and gradients of ``shared(query, key, value)`` to those of one process."""
    whole = [x.requires_grad_() for x in projections(heads, kv, length=4 * world)]
    expected = attend(*whole, "causal" if causal else None)
    upper = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (expected * upper).sum().backward()
    mine = [part(x, rank, world, 1) for x in whole]
    out = shared(*mine)
    (out * part(upper, rank, world, 1).detach()).sum().backward()
    pairs = [(out, part(expected, rank, world, 1))]
    return worst(pairs + [(x.grad, part(y.grad, rank, world, 1)) for x, y in zip(mine, whole)])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_ranks(init=True)
def test_equals_one_process(rank, world):
    for heads, kv in ((2, 2), (4, 1)):
        for causal in (True, False):

            def shared(*parts, causal=causal):
                turned = (x.transpose(1, 2) for x in parts)
                return ring_attention(*turned, dist.get_world_group(), causal=causal).transpose(1, 2)

            assert gap_of(rank, world, heads, kv, causal, shared) < 1e-12


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks(init=True)
def test_causal_work_is_balanced(rank, world):
    ring = Ring(dist.get_world_group(), True)
    blocks = [block for source in range(world) for block in ring.blocks(source)]
    mine = torch.arange(4.0).view(1, 1, 4, 1) + 4 * rank
    (there,) = ring.balanced([mine])
    assert torch.equal(ring.balanced([there], back=True)[0], mine)
    halves = [piece * 2.0 for piece in ring.pieces(rank)]
    assert there.flatten().tolist() == [start + step for start in halves for step in range(2)]
    assert (len(blocks), sum(diagonal for *_, diagonal in blocks)) == (2 * world + 1, 2)


@on_ranks(2, init=True, timeout=60)
def test_bad_input_is_an_error_on_every_rank(rank, world):
    def call(what):
        query, key, value = (x.transpose(1, 2) for x in projections(4, 2, length=3 if what == "odd" else 4 + rank))
        if what == "shapes":
            query, key, value = (x.transpose(1, 2) for x in projections(4, 4, length=4))
            key = key[:, :3]
        return ring_attention(query, key, value, dist.get_world_group())

    cases = {"odd": "of 3 tokens has none", "lengths": "rank 0: 4, rank 1: 5", "shapes": "one sequence"}
    for case, words in cases.items():
        refused(ValueError, words, call, case)


# ---- neighbours exchange heads, their groups are a ring --------------------------------------------------------------
def test_who_exchanges_heads():
    found = [
        (ranks, heads, methods.exchanging("auto", heads, ["here"] * ranks))
        for ranks, heads in [(4, 2), (4, 3), (8, 5), (3, 2), (6, 4), (4, 1)]
    ]
    assert found == [(4, 2, 2), (4, 3, 2), (8, 5, 4), (3, 2, 1), (6, 4, 3), (4, 1, 1)]


@on_ranks(4, init=True)
def test_both_together(rank, world):
    for heads, kv in [(2, 2), (3, 1), (3, 3), (1, 1)]:
        shared = functools.partial(UlyssesRing(dist.get_world_group(), heads), causal=True)
        assert gap_of(rank, world, heads, kv, True, shared) < 1e-12

"""A hundred steps of a small GPT: ZeRO++ and the optimizers whose ranks exchange signs learn as the plain ones do.

``benchmarks/python/compressed_convergence.py`` trains for longer and compares means of several seeds."""

import functools

import pytest

from compressed_gpt import train
from harness import run_ranks


@functools.lru_cache
def loss_of(kind):
    ranks = run_ranks(2, train, kind, 100, 0, 32, timeout=300)
    return sum(loss for loss, _ in ranks) / 2, ranks[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, plain, most", [("OneBitAdam", "AdamW", 1.03), ("ZeroOneAdam", "AdamW", 1.03), ("OneBitLamb", "Lamb", 1.4)]
)
def test_the_loss_is_near_the_plain_one(kind, plain, most):
    """LAMB's ratios are averaged over the twenty steps before the freeze only, from zero on."""
    loss, sent = loss_of(kind)
    expected, full = loss_of(plain)
    assert loss < most * expected and loss < 3.0, (loss, expected)  # 4.16 before the first step
    assert sent < full / 3.9, (sent, full)


@pytest.mark.slow
def test_zeropp_learns_as_stage_3_does():
    """Two hosts of one rank."""
    assert loss_of("ZeRO++")[0] == pytest.approx(loss_of("AdamW")[0], rel=0.03)

"""A script's own ``loss.backward()``, with losses of any form: the weights are those of plain PyTorch, or all ranks get
one clear error before the step. `make test` runs 48 random losses, `make test-all` 1,200."""

import pytest

from harness import run_ranks
from own_backwards import case_of, run_cases
from sampling import every_case

PART = 24
COUNT = 1200 if every_case() else 48


@pytest.mark.parametrize("part", range(COUNT // PART))
def test_random_losses(part):
    cases = [case_of(seed) for seed in range(part * PART, (part + 1) * PART)]
    for world in (1, 2):
        own = [case for case in cases if case["seed"] % 2 == world - 1]
        assert run_ranks(world, run_cases, own, init=True, timeout=240) == [[]] * world

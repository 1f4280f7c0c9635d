"""The methods by which ranks share an attention: their groups for heads, ranks and hosts, and impossible ones."""

import pytest

from deepspeed.comm.hosts import runs_of_hosts
from deepspeed.sequence.methods import exchanging, said
from refusals import refused

ONE, TWO = ["a"] * 4, ["a", "a", "b", "b"]


def test_neighbours_on_one_host():
    assert runs_of_hosts(ONE) == 4 and runs_of_hosts(TWO) == 2 and runs_of_hosts(["a", "b"]) == 1
    assert runs_of_hosts(["a", "a", "a", "b"]) == 1 and runs_of_hosts(["a"] * 2 + ["b"] * 4) == 2
    assert runs_of_hosts(ONE, 2) == 2 and runs_of_hosts(["a"] * 4 + ["b"] * 4, 8) == 4


@pytest.mark.parametrize(
    "method, heads, hosts, size",
    [
        ("auto", 8, ONE, 4),
        ("auto", 8, TWO, 2),  # an exchange inside of a host, a ring between hosts
        ("auto", 2, ONE, 2),  # more ranks than heads
        ("auto", 1, TWO, 1),
        ("auto", 5, ["a"] * 3, 3),
        ("auto", 8, ["a", "b", "a", "b"], 1),
        ("ulysses", 5, TWO, 4),
        ("ring", 8, ONE, 1),
        ("both", 8, ONE, 2),
        ("both", 8, ["a"] * 8, 4),
        ("both", 3, ["a"] * 8, 2),
        ("both", 8, ["a"] * 4 + ["b"] * 4, 4),
        ("ulysses", 1, ["a"], 1),
    ],
)
def test_how_many_exchange(method, heads, hosts, size):
    assert exchanging(method, heads, hosts) == size


@pytest.mark.parametrize(
    "method, heads, hosts, words",
    [
        ("ulysses", 2, ONE, '"ulysses" needs a head for each rank.*Model has 2 heads for 4 ranks. Sizes up to 2 work'),
        ("both", 4, ["a"] * 3, r'"both" needs neighbours.*3 ranks with 4 heads.*4, 6, 8, 9 \.\.\. ranks work'),
        ("both", 1, ONE, "no sizes"),
        ("star", 4, ONE, "'star': it must be one of auto, ulysses, ring, both"),
    ],
)
def test_the_impossible_is_named_with_what_works(method, heads, hosts, words):
    refused(ValueError, words, exchanging, method, heads, hosts, "Model")


def test_what_is_said():
    assert said("auto", 2, 4, 8).endswith("an exchange of tokens for heads among 2 neighbours, a ring of 2 groups")
    assert said("ring", 1, 4, 8).endswith("a ring of all") and "among all" in said("auto", 4, 4, 8)

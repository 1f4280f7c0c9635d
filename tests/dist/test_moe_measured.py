"""Countable properties of experts: whether runs repeat bit by bit, what a rank has, checkpoints at other degrees."""

import math
import os

import pytest

from engine_models import step_losses
from harness import on_ranks, run_ranks
from moe_models import batch, moe_net
from runs import engine_of, moments, settings, together
from sampling import every_case

EXPERTS, NUMBERS = 8, 2 * 6 * 9 + 9 + 6  # of an expert: two weights, two biases
LAYER = "deepspeed_moe.experts.deepspeed_experts."


def build(rank, world, stage, ep_size, drop=False, **more):
    net = moe_net(rank % ep_size, EXPERTS, ep_size, 2, drop, False)
    return engine_of(net, settings(stage, 8, rate=0.02, gradient_clipping=0.3, **more))


def train(engine, rank, steps):
    return step_losses(engine, (batch(step, rank) for step in range(steps)))


@on_ranks(2, init=True, timeout=240)
def test_all_runs_have_one_result(rank, world):
    found = set()
    for run in range(100 if every_case() else 6):  # half of them drop tokens
        engine = build(rank, world, 2, 2, drop=run % 2 == 1, moe={"overlap_chunks": 2})
        losses = train(engine, rank, 2)
        params = [master.numpy().tobytes() for (master,) in moments(engine, ()).values()]
        found.add((run % 2, *losses, *params))
        engine.destroy()
    assert len(found) == 2


@on_ranks(4, init=True)
def test_elements_of_experts_on_a_rank(rank, world):
    cases = [(0, 2), (1, 4), (2, 1), (3, 2)]
    if every_case():
        cases = [(stage, ep_size) for stage in range(4) for ep_size in (1, 2, 4)]
    for stage, ep_size in cases:
        engine = build(rank, world, stage, ep_size)
        experts = [param for name, param in engine.module.named_parameters() if LAYER in name]
        names = engine.stepping.names
        weights, masters = zip(*together(
            sum(p.ds_handle.own_numel if stage == 3 else p.numel() for p in experts),
            sum(numel for index, _, numel in engine.core.pieces() if LAYER in names[index]),
        ), strict=True)  # fmt: skip
        local, copies = EXPERTS // ep_size * NUMBERS, world // ep_size
        if stage < 3:
            assert set(weights) == {local}
        else:
            assert sum(weights) == EXPERTS * NUMBERS
        if stage == 0:
            assert set(masters) == {local}
        else:  # each element has one owner, and no rank much more than its share
            assert sum(masters) == EXPERTS * NUMBERS
            assert max(masters) <= math.ceil(local / copies) + 4 * EXPERTS // ep_size * copies


def states(engine):
    """(number of an expert, name below it) -> master and moments, bit by bit."""
    numbers, found = engine.module.layer.deepspeed_moe.experts.deepspeed_experts.ds_expert_numbers, {}
    for name, kinds in moments(engine).items():
        local, _, rest = name.partition(LAYER)[2].partition(".")
        found[(numbers[local], rest) if local else name] = [kind.numpy().tobytes() for kind in kinds]
    return found


def saved_body(rank, world, folder, stage, ep_size, loads):
    engine = build(rank, world, stage, ep_size)
    if loads:
        engine.load_checkpoint(folder, "one")
    else:
        train(engine, rank, 2)
        engine.save_checkpoint(folder, "one")
    return states(engine)


MANY = pytest.mark.every("eight ranks of what fewer do, too")


@pytest.mark.parametrize(
    "world, ep_size, stage, before",
    [(2, 2, 3, 1), (2, 1, 0, 3), pytest.param(8, 8, 2, 0, marks=MANY), pytest.param(8, 8, 3, 3, marks=MANY)],
)
def test_four_ranks_experts_on_others(world, ep_size, stage, before, tmp_path):
    expected = {}
    for one in run_ranks(4, saved_body, str(tmp_path), before, 4, False, init=True):
        expected.update(one)
    for one in run_ranks(world, saved_body, str(tmp_path), stage, ep_size, True, init=True):
        assert sum(isinstance(key, tuple) for key in one) == EXPERTS // ep_size * 4
        assert all(value == expected[key] for key, value in one.items())
    if before < 3:
        for expert in range(EXPERTS):
            file = tmp_path / "one" / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt"
            assert os.path.getsize(file) <= 4 * NUMBERS + 4096

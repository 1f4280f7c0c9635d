"""The costs of ZeRO: bytes held, elements sent, elements gathered at one time, calls from Python into the core."""

from unittest import mock

import pytest
import torch

from deepspeed import _native
from deepspeed.zero.gathers import linear
from harness import on_ranks, run_ranks
from models import Parts
from runs import dtype_of, engine_of, settings
from runs import train as train_on

WIDTH, LAYERS = 96, 6


def block():
    return Parts(
        lambda net, x: x + torch.tanh(net.second(torch.tanh(net.first(x)))),
        first=torch.nn.Linear(WIDTH, WIDTH),
        second=torch.nn.Linear(WIDTH, WIDTH),
    )


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[block() for _ in range(LAYERS)])


NUMEL = sum(p.numel() for p in make_model().parameters())
LARGEST = WIDTH * WIDTH


def make_engine(stage, accumulate=1, bf16=False, **zero):
    zero = {"stage3_param_persistence_threshold": 200, **zero}
    return engine_of(make_model(), settings(stage, 2, accumulate, "bf16" if bf16 else "fp32", rate=1e-3, zero=zero))


def train(engine, rank, steps=1):
    def loss_at(step, micro):
        x = torch.full((2, WIDTH), 0.1 * (rank + step + micro), dtype=dtype_of(engine))
        return engine(x).float().square().mean()

    train_on(engine, loss_at, steps)
    return engine


@pytest.mark.sample("values", 8)
@pytest.mark.parametrize("accumulate, width", [(1, 2), (4, 4)])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks()
def test_held_bytes_are_the_formula(rank, world, stage, accumulate, width):
    """The published 2 + 2 + 12 where nothing accumulates; fp32 gradients where something does."""
    widths = {"param": (2, 3), "grad": (width, 2), "master": (4, 1), "slots": (8, 1)}  # bytes; the stage that cuts them
    planned = {what: size * -(-NUMEL // (world if stage >= cut else 1)) for what, (size, cut) in widths.items()}
    padding = 1.02
    engine = train(make_engine(stage, accumulate, bf16=True), rank, 2)
    held = dict(engine.core.held_bytes())
    for what, name in (("param", "lp"), ("master", "master"), ("slots", "slots")):
        assert planned[what] <= held[name] <= padding * planned[what], what
    assert planned["grad"] <= held["grad"] + held["local"] <= padding * planned["grad"] + 1


def body_traffic(rank, world, stage, accumulate, zero):
    engine = train(make_engine(stage, accumulate, **zero), rank, 2)
    engine.core.reset_traffic()
    if stage == 3:
        engine.core.gatherer.reset_counters()
    train(engine, rank)
    sent = engine.core.traffic()
    return sent["elements"], sent["calls"], engine.core.gatherer.gathered_elements if stage == 3 else 0


def small_change(world):
    """Flags of used parameters, the norm, and padding."""
    return 2 * (4 * LAYERS + 40) + 0.03 * NUMEL


@pytest.mark.sample("values")
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_communication_of_the_replicated_stages(stage, world):
    share = (world - 1) / world
    for sent, _, _ in run_ranks(world, body_traffic, stage, 1, {}):
        assert sent <= 2 * NUMEL * share + small_change(world)


@pytest.mark.sample("values")
@pytest.mark.parametrize(
    "zero, gathers", [({"stage3_max_reuse_distance": 0}, 2), ({}, 1)], ids=["nothing kept", "kept for backward"]
)
@pytest.mark.parametrize("world", [2, 4])
def test_communication_of_stage_3(world, zero, gathers):
    share = (world - 1) / world
    for sent, _, gathered in run_ranks(world, body_traffic, 3, 1, zero):
        assert sent <= NUMEL * share + small_change(world)
        assert gathered <= gathers * NUMEL * share + small_change(world)


def body_collectives(rank, world, stage):
    engine = train(make_engine(stage, 4), rank, 2)
    engine.core.reset_traffic()
    train(engine, rank)
    return engine.core.traffic()["calls"]


def test_no_hidden_collectives():
    """Stage 1 communicates at the boundary alone: what its buckets need, once for the flags, once for the norm."""
    calls = run_ranks(2, body_collectives, 1)[0]
    buckets = run_ranks(2, body_buckets, 1)[0]
    assert calls == 2 * buckets + 2
    calls = run_ranks(2, body_collectives, 2)[0]
    assert calls == 4 * (buckets + 1) + buckets + 1


def body_buckets(rank, world, stage):
    engine = make_engine(stage)
    engine.core.reset_traffic()
    engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
    return engine.core.traffic()["calls"] - 1


@pytest.mark.parametrize(
    "zero, units",
    [({"stage3_max_reuse_distance": 0}, 1), ({"stage3_max_live_parameters": 3 * LARGEST}, 4)],
    ids=["one unit at a time", "what it may for backward"],
)
@on_ranks(2)
def test_what_stage_3_keeps_gathered(rank, world, zero, units):
    engine = train(make_engine(3, **zero), rank, 2)
    gatherer = engine.core.gatherer
    persistent = sum(p.ds_numel for p in engine.module.parameters() if p.ds_persist)
    gatherer.reset_peak()
    train(engine, rank)
    assert gatherer.peak_live_numel <= units * LARGEST + persistent
    assert gatherer.live_numel == persistent


class Counting:
    """Counts calls of an object's methods."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def __getattr__(self, name):
        value = getattr(self.inner, name)
        if not callable(value):
            return value

        def call(*args, **kwargs):
            self.calls += 1
            return value(*args, **kwargs)

        return call


@pytest.mark.sample("values")
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_entries_into_the_core(rank, world, stage, accumulate):
    engine = train(make_engine(stage, accumulate), rank, 2)
    counter = Counting(engine.core)
    engine.core = engine.stepping.core = counter
    if hasattr(engine.optimizer, "core"):
        engine.optimizer.core = counter
    bring_home = _native._C.bring_home

    def counted(core, rows):
        counter.calls += 1
        return bring_home(core.inner, rows)

    with mock.patch.object(_native._C, "bring_home", counted):
        train(engine, rank)
    # Before and after forward, before backward; before the step, the step. The window does no work and is not counted.
    assert counter.calls == 3 * accumulate + 2
    if stage == 3:  # around each unit, and around the model
        assert len(engine.parameter_offload.forward_hooks) == 2 * (2 * LAYERS) + 2


@pytest.mark.parametrize("efficient", [True, False])
@on_ranks(2)
def test_gathered_weights_are_free_after_forward(rank, world, efficient):
    """torch's linear saves a view of the weight, which keeps its memory until backward; ours does not."""
    engine = train(make_engine(3, stage3_max_reuse_distance=0, memory_efficient_linear=efficient), rank)
    engine.empty_partition_cache()
    loss = engine(torch.ones(2, WIDTH)).square().mean()
    engine.core.gatherer.release_all()  # the last one was kept for backward
    kept = engine.core.gatherer.pool_bytes
    engine.backward(loss)
    engine.destroy()
    assert torch.nn.functional.linear is linear._torch_linear
    assert (kept >= 4 * LARGEST) == efficient


@pytest.mark.parametrize("zero", [{"overlap_comm": True}, {"overlap_comm": False}], ids=["overlap", "no overlap"])
@on_ranks(2)
def test_stage_2_never_holds_all_gradients(rank, world, zero):
    """Slots of a few buckets, and what has landed for this rank: from the first backward on."""
    whole = 4 * NUMEL
    engine = train(make_engine(2, 2, reduce_bucket_size=2 * LARGEST, **zero), rank, 3)
    borrowed = engine.core.peak_borrowed_bytes
    assert borrowed <= 3 * 4 * 2 * LARGEST + whole / 2 + 0.05 * whole
    assert borrowed < 0.95 * whole

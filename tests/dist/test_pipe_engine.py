"""PipelineEngine: what stages compute together is what one plain process computes."""

import pytest
import torch

import pipe_models as models
from harness import on_ranks, run_ranks
from refusals import refused

BATCHES, MICRO_BATCHES = 2, 4


pytestmark = pytest.mark.any_device


def _looked_at(data, engine, whole):
    """``data``; whenever an item is taken, the bytes of whole gradients go into ``whole``."""
    for item in data:
        whole.append(engine.core.held_bytes()["local"])
        yield item


def _trains(rank, world, kind, stages, stage, sections, options, tolerance):
    copies = world // stages
    engine = models.engine_of(kind, stages, world, MICRO_BATCHES, stage, options, **sections)
    copy = engine.grid.get_data_parallel_rank()
    whole = []
    data = _looked_at(models.batches(kind, BATCHES, MICRO_BATCHES, copy), engine, whole)
    losses = [engine.train_batch(data_iter=data).item() for _ in range(BATCHES)]
    clip = sections["gradient_clipping"]
    wanted = models.plain(kind, BATCHES, MICRO_BATCHES, copies, clip=clip)
    assert float(engine.get_global_grad_norm()) == pytest.approx(wanted.norms[-1], rel=1e-4)  # tied weights count once
    models.compare(engine, losses, models.parameters_of(engine), wanted, tolerance)
    assert engine._stage_policy.shards_grads == (stage >= 2) and (stage < 2 or not any(whole))
    assert engine.global_steps == BATCHES and engine.micro_steps == BATCHES * MICRO_BATCHES
    assert engine.global_samples == BATCHES * MICRO_BATCHES * models.MICRO * copies
    if engine.is_first_stage() or engine.is_last_stage():
        refused(StopIteration, None, next, data)
    return losses, {name: value for name, value in models.parameters_of(engine).items()}


def run(kind, stages, copies, stage, tolerance=2e-6, options=None, **sections):
    return run_ranks(
        stages * copies, _trains, kind, stages, stage, {"gradient_clipping": 0.5, **sections}, options, tolerance,
        init=True,
    )  # fmt: skip


KINDS = ["plain", "tied", "twice", "frozen", "masked", "shapes"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages, copies, stage", [(2, 1, 0), (2, 2, 1), (2, 2, 2), (2, 2, 3)])
@pytest.mark.sample("values")
def test_equals_one_process(kind, stages, copies, stage):
    found = run(kind, stages, copies, stage)
    assert all(losses == found[0][0] for losses, _ in found)
    if kind == "tied":
        tied = [state[name] for _, state in found for name in ("0.weight", "7.weight") if name in state]
        assert len(tied) == 2 * copies and all(torch.equal(one, tied[0]) for one in tied)


@pytest.mark.sample("values")
@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("stages", [1, 3, 4])
def test_other_numbers_of_stages(kind, stages):
    run(kind, stages, 1, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "schedule, virtual, placement",
    [("interleaved", 2, "loop"), ("gpipe", 1, "loop"), ("zb-h1", 1, "loop"), ("zb-v", 2, "v"), ("dualpipe-v", 2, "v")],
)
@pytest.mark.parametrize("stages, copies, stage", [(1, 1, 0), (2, 1, 0), (2, 2, 2), (2, 2, 3), (4, 1, 1)])
@pytest.mark.sample("values", 8)
def test_schedules(kind, schedule, virtual, placement, stages, copies, stage):
    options = {"virtual_stages": virtual, "placement": placement}
    run(kind, stages, copies, stage, options=options, pipeline={"schedule": schedule})


@pytest.mark.parametrize("kind", ["plain", "tied", "twice", "masked"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.sample("values")
def test_recomputed(kind, schedule, reentrant):
    options = {"activation_checkpoint_interval": 2}
    run(kind, 2, 1, 0, options=options, pipeline={"schedule": schedule, "use_reentrant": reentrant})


def _choice(world, limit):
    engine = models.engine_of("plain", 2, world, 8, pipeline={"schedule": "auto", "memory_limit": limit})
    if limit == 1:
        refused((ValueError, RuntimeError), "memory_limit|bytes", engine.train_batch, models.batches("plain", 1, 8, 0))
        return None
    losses = [engine.train_batch(models.batches("plain", 1, 8, 0)).item() for _ in range(2)]
    assert losses[1] < losses[0]
    return engine.pipe_plan().schedule, engine._plans.planned(8).plan.schedule


@on_ranks(2, init=True)
def test_auto(rank, world):
    assert [_choice(world, limit) for limit in (0, 1)] == [("zb-h1", "zb-h1"), None]


def test_offloaded():
    run("tied", 2, 2, 2, zero_optimization={"offload_optimizer": {"device": "cpu"}})


@on_ranks(4, init=True)
def test_one_result(rank, world):
    found = set()
    for _ in range(4):
        engine = models.engine_of("plain", 2, world, MICRO_BATCHES, 1)
        copy = engine.grid.get_data_parallel_rank()
        losses = [engine.train_batch(models.batches("plain", 1, MICRO_BATCHES, copy)).item() for _ in range(2)]
        values = torch.cat([one.flatten() for one in models.parameters_of(engine).values()])
        found.add((*losses, values.double().sum().item(), values.double().square().sum().item()))
    assert len(found) == 1

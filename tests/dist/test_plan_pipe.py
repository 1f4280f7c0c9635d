"""Plans of pipelines against runs: messages and collectives of each stage, and its memory at the peak."""

import functools
import gc
import itertools

import pytest
import torch
from torch import nn

import deepspeed
import devices
import pipe_models as models
from allocated_memory import HAS_COUNT, Peak, allocated
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)
from deepspeed.planner import Machine
from harness import on_ranks
from plan_calls import calls_of, calls_while, planned_calls
from refusals import refused
from runs import engine_of, together
from sliced_layers import Sliced
from sliced_layers import batch as slice_batch

MICRO_BATCHES, NOTE = 4, 256
ON_CPU = devices.NAME == "cpu"

CASES = [
    (2, 0, "plain", "1f1b", 1, {}),
    (2, 0, "plain", "zb-h1", 1, {"activation_checkpoint_interval": 2}),
    (2, 1, "masked", "gpipe", 1, {}),
    (2, 0, "tied", "zb-v", 2, {"placement": "v"}),
    (4, 1, "plain", "1f1b", 1, {}),
    (4, 2, "tied", "interleaved", 2, {"activation_checkpoint_interval": 1}),
    (4, 2, "frozen", "zb-h1", 1, {}),
]


@pytest.mark.any_device
@pytest.mark.parametrize("world, stage, kind, schedule, parts, options", CASES)
@on_ranks(init=True)
def test_messages_and_collectives_are_those_of_a_run(rank, world, stage, kind, schedule, parts, options):
    options, section = {"virtual_stages": parts, **options}, {"schedule": schedule}
    engine = models.engine_of(kind, 2, world, MICRO_BATCHES, stage, options, pipeline=section)
    data = models.batches(kind, 2, MICRO_BATCHES, 0)
    engine.train_batch(data)
    before = engine.channel.sent
    ran = calls_of(calls_while(lambda: engine.train_batch(data)))
    messages, size = (after - then for after, then in zip(engine.channel.sent, before))
    engine.destroy()
    make = functools.partial(models.module_of, kind, 2, world, **options)
    config, sample = models.config_of(MICRO_BATCHES, stage, pipeline=section), models.micro_batch(kind, 0, 0, 0)
    plan = deepspeed.plan(make, config, world, sample=sample, ranks=[rank])
    planned = planned_calls(plan, rank)
    assert planned["send"][1] == size + NOTE * messages
    if ON_CPU:  # the ranks of a host read messages in each other's memory
        planned = {verb: figures for verb, figures in planned.items() if verb not in ("send", "recv")}
    assert planned == ran


ROWS, WIDTH, LAYERS = 2048, 64, 4


class Block(nn.Module):
    """As much memory in states as in activations."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x[: ROWS // 64])).mean(0))
        for _ in range(8):
            x = torch.tanh(x)
        return x


def blocks(parts=1, interval=0, placement="loop"):
    return PipelineModule(
        [LayerSpec(Block) for _ in range(LAYERS)], num_stages=2, partition_method="uniform",
        loss_fn=lambda out, labels: (out - labels).square().mean(), virtual_stages=parts, placement=placement,
        activation_checkpoint_interval=interval,
    )  # fmt: skip


@pytest.mark.skipif(not HAS_COUNT or not ON_CPU, reason="what this libc counts is the memory of the CPU")
@pytest.mark.parametrize(
    "world, stage, schedule, more",
    [
        (2, 0, "1f1b", {}),
        (2, 0, "gpipe", {"interval": 1}),
        (2, 1, "zb-h1", {}),
        (4, 2, "interleaved", {"parts": 2}),
        (4, 1, "zb-v", {"parts": 2, "placement": "v"}),
    ],
)
@on_ranks(init=True)
def test_the_peak_is_that_of_a_run(rank, world, stage, schedule, more):
    config = models.config_of(MICRO_BATCHES, stage, pipeline={"schedule": schedule})
    sample = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    plan = deepspeed.plan(functools.partial(blocks, **more), config, world, sample=sample, ranks=[rank])
    planned = next(one.peak_bytes for one in plan.ranks if one.rank == rank)
    data = ((torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in itertools.count())
    engine = engine_of(blocks(**more), config)
    engine.train_batch(data)  # torch imports modules and opens connections, which stay
    engine.destroy()
    del engine
    gc.collect()
    before = allocated()
    engine = engine_of(blocks(**more), config)
    engine.train_batch(data)
    peak = Peak()
    with peak:
        engine.train_batch(data)
    found = together(planned, peak.bytes - before)
    assert planned == pytest.approx(peak.bytes - before, rel=0.1), found


def sliced():
    """Two stages of two ranks that share each layer."""
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    Sliced.grid = PipelineParallelGrid(topology)
    layers = [LayerSpec(Sliced) for _ in range(4)]
    return PipelineModule(layers, topology=topology, loss_fn=models.loss_of("plain"), partition_method="uniform")


@pytest.mark.parametrize("partitioned", [True, False])
@on_ranks(4, init=True)
def test_stages_of_several_ranks(rank, world, partitioned):
    cut = {"pipe_partitioned": partitioned, "grad_partitioned": partitioned}
    config, sample = models.config_of(MICRO_BATCHES, 1, pipeline=cut), slice_batch(0, 0)[0]
    engine = engine_of(sliced(), config)
    data = itertools.repeat(sample)
    engine.train_batch(data)
    before = engine.channel.sent
    ran = calls_of(calls_while(lambda: engine.train_batch(data)))
    messages, size = (after - then for after, then in zip(engine.channel.sent, before))
    words = "pass deepspeed.plan a function that makes the grid, the layers and the PipelineModule"
    refused(ValueError, words, engine.plan)
    engine.destroy()
    planned = planned_calls(deepspeed.plan(sliced, config, world, sample=sample, ranks=[rank]), rank)
    assert planned.pop("send")[1] == size + NOTE * messages and planned.pop("recv")
    assert planned == ran


@on_ranks(2, init=True)
def test_an_engine_that_trains_plans_all_stages(rank, world):
    config, sample = models.config_of(MICRO_BATCHES, 1, bf16={"enabled": True}), models.micro_batch("tied", 0, 0, 0)
    engine = models.engine_of("tied", 2, world, MICRO_BATCHES, 1, bf16={"enabled": True})
    refused(ValueError, "does not know the inputs yet", engine.plan)
    engine.train_batch(itertools.repeat(sample))
    found = engine.plan("1GB")
    again = deepspeed.plan(functools.partial(models.module_of, "tied", 2, world), config, world, "1GB", sample)
    assert [one.rank for one in found.ranks] == [0, 1] and found.fits and found.parameters == again.parameters
    for one, other in zip(found.ranks, again.ranks):
        assert (one.calls, one.peak_bytes, one.owners) == (other.calls, other.peak_bytes, other.owners)
    engine.train_batch(itertools.repeat(sample))
    engine.destroy()


@on_ranks(2, init=True)
def test_the_plan_of_a_schedule_has_the_states_and_types_of_the_engine(rank, world):
    engine = engine_of(blocks(), models.config_of(MICRO_BATCHES, bf16={"enabled": True}))
    sample = torch.zeros(2, ROWS, WIDTH, dtype=torch.bfloat16)
    engine.train_batch(itertools.repeat(tuple(sample)))
    plan = engine.pipe_plan()
    for stage in plan.stages:
        assert stage.state_bytes == pytest.approx(18 * stage.parameters, rel=0.05)  # 2 + 4 + 4 + 8
    assert plan.stages[rank].bytes_sent == engine.channel.sent[1] == MICRO_BATCHES * sample[0].numel() * 2
    engine.destroy()


EXACT = Machine("test", {"float32": 1e12}, 1e11, 0, (0, 0), (0, 0), 1e10, 1e9, 1e10)


@pytest.mark.parametrize("schedule, bubble", [("1f1b", 1 / 5), ("gpipe", 1 / 5), ("interleaved", 1 / 9)])
def test_stages_wait_as_the_schedule_says(schedule, bubble):
    parts = 2 if schedule == "interleaved" else 1
    section = {"pipeline": {"schedule": schedule}}
    sample = torch.zeros(256, 256), torch.zeros(256, 256)
    plan = deepspeed.plan(
        functools.partial(squares, parts), models.config_of(4, **section), 2, sample=sample, machine=EXACT
    )
    for one in plan.ranks:
        took = [one.seconds[name] for name in ("forward", "backward", "bubble")]
        assert took[2] / sum(took) == pytest.approx(bubble, abs=0.02)
    assert plan.seconds == pytest.approx(max(sum(one.seconds.values()) for one in plan.ranks))


def squares(parts):
    """Layers that take equally long, next to which the loss takes little."""
    layers = [LayerSpec(nn.Linear, 256, 256, bias=False) for _ in range(32)]
    return PipelineModule(layers, num_stages=2, loss_fn=lambda out, _: out[0, 0] * 1, virtual_stages=parts)


@pytest.mark.parametrize(
    "words, change",
    [
        ("a pair .inputs, labels.", {"sample": torch.zeros(2, 4, 6)}),
        ("PipelineModule.loss_fn=. is their loss", {"loss": lambda out: out}),
        ("has 2 ranks, but there are 3", {"world": 3}),
        (
            "the bounds of the parts",
            {"options": {"partition_method": "profile", "profile_input": torch.zeros(2, 4, 6)}},
        ),
        ("no pipeline schedule fits into pipeline.memory_limit 1", {"schedule": "auto"}),
    ],
)
def test_what_does_not_fit_together(words, change):
    sample = change.get("sample", models.micro_batch("plain", 0, 0, 0))
    section = {"schedule": change.get("schedule", "1f1b"), "memory_limit": 1}
    make = functools.partial(plain_module, change.get("options", {}))
    given = models.config_of(MICRO_BATCHES, pipeline=section), change.get("world", 2)
    refused(ValueError, words, deepspeed.plan, make, *given, sample=sample, loss=change.get("loss"))


def plain_module(options):
    topology = PipeDataParallelTopology(num_pp=2, num_dp=1)
    return PipelineModule(models.specs("plain"), topology=topology, loss_fn=models.loss_of("plain"), **options)

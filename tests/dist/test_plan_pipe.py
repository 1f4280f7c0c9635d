"""Plans of pipelines against runs: messages and collectives of each stage, and its memory at the peak."""

import functools

import pytest
import torch
from torch import nn

import deepspeed
import devices
import pipe_models as models
from allocated_memory import HAS_COUNT, Peak, allocated
from deepspeed.pipe import LayerSpec, PipelineModule
from harness import on_ranks
from plan_calls import calls_of, calls_while, planned_calls
from runs import engine_of, together

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
    before = allocated()
    engine = engine_of(blocks(**more), config)
    data = ((torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(2 * MICRO_BATCHES))
    engine.train_batch(data)
    peak = Peak()
    with peak:
        engine.train_batch(data)
    found = together(planned, peak.bytes - before)
    assert planned == pytest.approx(peak.bytes - before, rel=0.1), found

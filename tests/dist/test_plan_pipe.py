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

"""``deepspeed.plan`` against runs: the calls of a step and the memory of the device at its peak."""

import functools

import pytest
import torch

import deepspeed
import devices
import toy_transformers
from deepspeed import _native
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.timed import call_log
from engine_models import batch, config, loss_of, make_net, net_engine
from harness import on_ranks
from models import beside, seeded
from plan_calls import calls_of, planned_calls
from runs import engine_of, settings, take_step

HOST = {"offload_optimizer": {"device": "cpu"}}
ON_CPU = devices.NAME == "cpu"


def step_of(engine, rank, world, accumulate):
    for number in range(accumulate):
        tokens, targets = (part.chunk(world)[rank] for part in batch(number, 8 * accumulate))
        tokens, targets = (part[: 8 // world] for part in (tokens, targets))
        take_step(engine, loss_of(engine(beside(engine, tokens)), targets))


@pytest.mark.any_device
@pytest.mark.parametrize(
    "world, stage, accumulate, more",
    [
        pytest.param(2, 0, 1, {}, marks=pytest.mark.skipif(ON_CPU, reason="kernels of the CPU cannot fail")),
        (2, 1, 2, {}),
        (2, 2, 1, {}),
        (2, 2, 2, {"bf16": {"enabled": True}}),
        (2, 2, 1, {"zero": HOST}),
        pytest.param(2, 3, 1, {}, marks=pytest.mark.skipif(ON_CPU, reason="ranks of one host read shared memory")),
        pytest.param(2, 3, 2, {"zero": HOST}, marks=pytest.mark.skipif(ON_CPU, reason="as above")),
    ],
)
@on_ranks(init=True)
def test_calls_and_peaks_are_those_of_a_run(rank, world, stage, accumulate, more):
    engine = net_engine(world, stage, accumulate=accumulate, **more)
    step_of(engine, rank, world, accumulate)
    recorder = _native._C.CallRecorder(False)
    call_log.add(recorder)
    get_accelerator().reset_peak_memory_stats()
    step_of(engine, rank, world, accumulate)
    get_accelerator().synchronize()
    ran, peak = recorder.take(), get_accelerator().max_memory_allocated()
    call_log.remove(recorder)
    engine.destroy()
    zero = {"stage": stage, **more.pop("zero", {})}
    given = config(world, accumulate, zero_optimization=zero, **more)
    tokens, targets = (part[: 8 // world // accumulate] for part in batch(0, 8))
    loss = functools.partial(loss_of, targets=targets)
    plan = deepspeed.plan(make_net, given, world, sample=tokens, ranks=[rank], loss=loss)
    assert planned_calls(plan) == calls_of(ran)
    if ON_CPU:
        return  # has no allocator that counts
    assert plan.peak_bytes == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("world, section", [(2, {"size": 2}), (2, {"size": 2, "method": "ring"}), (4, {"size": 2})])
@on_ranks(init=True)
def test_the_calls_of_ranks_that_share_sequences(rank, world, section):
    with toy_transformers.installed():
        shape = {"heads": 4, "kv": 2, "hidden": 32, "layers": 2, "intermediate": 64, "vocabulary": 100}
        config = settings(1, sequence_parallel=section)
        ids = torch.zeros(2, 32, dtype=torch.int64)
        model, sample = seeded(toy_transformers.ToyForCausalLM, **shape), {"input_ids": ids, "labels": ids}
        plan = deepspeed.plan(model, config, world, sample=sample, ranks=[rank])
        engine = engine_of(model, config)
        inputs = {name: beside(engine, one) for name, one in sample.items()}
        take_step(engine, engine(**inputs).loss)
        recorder = _native._C.CallRecorder(False)
        call_log.add(recorder)
        take_step(engine, engine(**inputs).loss)
        get_accelerator().synchronize()
        ran = recorder.take()
        call_log.remove(recorder)
        engine.destroy()
    assert planned_calls(plan) == calls_of(ran)

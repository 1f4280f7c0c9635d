"""Reductions over NCCL run beside the backward: on the stand-in device, whose streams run behind their hosts."""

import time

import pytest
import standin
import torch
import torch.distributed

import deepspeed
import fake_nccl
from harness import run_ranks
from models import seeded
from runs import engine_of, settings, take_step

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")

LAYERS, WIDTH = 5, 8
LONG = 10  # seconds, that only a test which fails waits for


def stack():
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def ends_alone():
    """Whether the work on the current stream ends while no other rank goes on."""
    event, begin = torch.Event("standin"), time.monotonic()
    event.record(torch.standin.current_stream())
    while not event.query():
        if time.monotonic() - begin > LONG:
            return False
        time.sleep(0.001)
    return True


def streams_in_backward(rank, world, stage, zero):
    """For each layer but the first: whether the stream of rank 0 ends its work up to the next gradient while rank 1 has
    not begun the reduction of the layer."""
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    standin.choose(1)
    zero = {"reduce_bucket_size": WIDTH * WIDTH, "overlap_comm": True, **zero}
    engine = engine_of(seeded(stack), settings(stage, zero=zero))
    store = torch.distributed.distributed_c10d._get_default_store()
    x, found = torch.ones(2, WIDTH, device=engine.device), {}

    def at_gradient(number):
        if rank == 0 and number + 1 < LAYERS:
            found[number + 1] = ends_alone()
            store.set(f"reduce {number + 1}", "")
        if rank == 1 and number > 0:
            store.wait([f"reduce {number}"])

    for _ in range(2):  # the device has all memory of a step afterwards
        take_step(engine, engine(x).square().sum())
    for number, layer in enumerate(engine.module):
        layer.weight.register_hook(lambda grad, number=number: at_gradient(number))
    take_step(engine, engine(x).square().sum())
    engine.destroy()
    assert standin.faults_at_end() == []
    return found


@pytest.mark.parametrize(
    "stage, zero",
    [
        (1, {}),
        (2, {}),
        (2, {"offload_optimizer": {"device": "cpu"}}),
        (3, {"stage3_param_persistence_threshold": WIDTH * WIDTH}),  # no gathers: they would wait for rank 1
    ],
)
def test_backward_does_not_wait_for_the_reduction_that_has_just_begun(stage, zero, tmp_path):
    variables = {"DS_STANDIN_NCCL": fake_nccl.build(tmp_path)}
    found, _ = run_ranks(2, streams_in_backward, stage, zero, init=True, fresh=True, timeout=200, env=variables)
    assert found == dict.fromkeys(range(1, LAYERS), True)


def streams_in_forward(rank, world):
    """For each layer with one behind it: whether the stream of rank 0 ends the layer while rank 1 has not begun the
    gather of the next one, which rank 0 has started ahead."""
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    standin.choose(1)
    zero = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1}  # one layer ahead
    engine = engine_of(seeded(stack), settings(3, zero=zero))
    assert engine.core.gatherer.source == "scheduled collectives"
    store = torch.distributed.distributed_c10d._get_default_store()
    x, found = torch.ones(2, WIDTH, device=engine.device), {}

    def at_end_of(number):
        if rank == 0 and 0 < number < LAYERS - 1:
            found[number] = ends_alone()
            store.set(f"gather {number}", "")
        if rank == 1 and number < LAYERS - 2:
            store.wait([f"gather {number + 1}"])

    for _ in range(3):  # the order of gathers is known, and the device has all memory of a step
        take_step(engine, engine(x).square().sum())
    for number, layer in enumerate(engine.module):
        layer.register_forward_hook(lambda *_, number=number: at_end_of(number))
    take_step(engine, engine(x).square().sum())
    engine.destroy()
    assert standin.faults_at_end() == []
    return found


def test_forward_does_not_wait_for_the_gather_that_has_just_begun(tmp_path):
    variables = {"DS_STANDIN_NCCL": fake_nccl.build(tmp_path)}
    found, _ = run_ranks(2, streams_in_forward, init=True, fresh=True, timeout=200, env=variables)
    assert found == dict.fromkeys(range(1, LAYERS - 1), True)

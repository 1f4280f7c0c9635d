"""ZeRO stages on a device, against a plain process on the CPU: one rank over NCCL on a GPU, two over gloo."""

import pytest

import deepspeed
import devices
from deepspeed.accelerator import get_accelerator
from engine_models import config, difference, make_net, net_engine, plain_net, train_engine
from harness import on_ranks, run_ranks
from runs import weight_list

pytestmark = pytest.mark.gpu
STEPS = 20


def body(rank, world, stage, accumulate, precision):
    if world > 1:
        deepspeed.init_distributed(dist_backend="gloo")
    zero = {"stage": stage, "reduce_bucket_size": 300, "stage3_param_persistence_threshold": 20}
    engine = deepspeed.initialize(
        model=make_net(),
        config=config(world, accumulate, zero_optimization=zero, **precision),
        dist_init_required=world == 1,
    )[0]
    assert engine.device.type == devices.NAME
    losses, norms = train_engine(engine, STEPS, rank, world)
    found = make_net()
    for mine, theirs in zip(found.parameters(), weight_list(engine)):
        mine.data.copy_(theirs.float().cpu())
    return losses, norms, difference(found, plain_net(STEPS).model)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_on_the_device_equals_plain_training(stage, world, accumulate):
    expected = plain_net(STEPS)
    results = run_ranks(world, body, stage, accumulate, {})
    for step in range(STEPS):
        assert sum(r[0][step] for r in results) / world == pytest.approx(expected.means[step], rel=1e-5)
    for _, norms, gap in results:
        assert norms == pytest.approx(expected.norms, rel=1e-4)
        assert gap < 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sixteen_bits_on_the_device(stage, precision):
    expected = plain_net(STEPS)
    ((losses, _, _),) = run_ranks(1, body, stage, 2, {precision: {"enabled": True}})
    assert losses[-1] == pytest.approx(expected.means[-1], rel=0.08)


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(1, timeout=240)
def test_a_thousand_steps_allocate_nothing_more(rank, world, stage):
    engine = net_engine(world, stage, bf16={"enabled": True})
    reserved = []
    for turn in range(11):
        train_engine(engine, 10 if turn == 0 else 100, rank, world)
        get_accelerator().synchronize()
        reserved.append((get_accelerator().memory_reserved(), get_accelerator().memory_allocated()))
    assert reserved[-1] == reserved[1]

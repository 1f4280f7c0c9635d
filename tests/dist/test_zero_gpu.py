"""The net on a device at every stage, against a plain process on the CPU. One rank uses NCCL, which takes no two ranks
on one GPU; two use gloo."""

import pytest

import deepspeed
import devices
from deepspeed.accelerator import get_accelerator
from engine_models import config, difference, make_net, net_engine, plain_net, train_engine
from harness import on_ranks, run_ranks
from runs import weight_list

pytestmark = pytest.mark.gpu


def body(rank, world, stage, accumulate, precision, user_backward, steps):
    if world > 1:
        deepspeed.init_distributed(dist_backend="gloo")
    zero = {"stage": stage, "reduce_bucket_size": 300, "stage3_param_persistence_threshold": 20}
    engine = deepspeed.initialize(
        model=make_net(),
        config=config(world, accumulate, zero_optimization=zero, **precision),
        dist_init_required=world == 1,
    )[0]
    assert engine.device.type == devices.NAME
    losses, norms = train_engine(engine, steps, rank, world, user_backward)
    found = make_net()
    for mine, theirs in zip(found.parameters(), weight_list(engine)):
        mine.data.copy_(theirs.float().cpu())
    return losses, norms, difference(found, plain_net(steps).model), engine.skipped_steps


CASES = [(stage, world, times, False, 20) for stage in range(4) for world in (1, 2) for times in (1, 2)]
CASES += [(0, 1, times, user_backward, 50) for times in (1, 4) for user_backward in (False, True)]


@pytest.mark.parametrize("stage, world, accumulate, user_backward, steps", CASES)
def test_fp32_on_the_device_equals_plain_training(stage, world, accumulate, user_backward, steps):
    expected = plain_net(steps)
    results = run_ranks(world, body, stage, accumulate, {}, user_backward, steps)
    for step in range(steps):
        assert sum(r[0][step] for r in results) / world == pytest.approx(expected.means[step], rel=1e-5)
    for _, norms, gap, _ in results:
        assert norms == pytest.approx(expected.norms, rel=1e-4)
        assert gap < 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage, steps, bound", [(0, 50, 0.05), (1, 20, 0.08), (2, 20, 0.08), (3, 20, 0.08)])
def test_sixteen_bits_on_the_device(stage, steps, bound, precision):
    expected = plain_net(steps)
    ((losses, _, _, skipped),) = run_ranks(1, body, stage, 2, {precision: {"enabled": True}}, False, steps)
    assert losses[-1] == pytest.approx(expected.means[-1], rel=bound)
    assert stage or skipped <= 16  # fp16 starts at 2**16 and finds its scale


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

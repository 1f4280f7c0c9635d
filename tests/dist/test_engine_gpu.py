"""The same engine on a device, against the same plain process on the CPU. One rank: NCCL gives no two on one GPU."""

import pytest

import deepspeed
import devices
from engine_models import config, difference, make_net, plain_net, train_engine
from harness import run_ranks

pytestmark = pytest.mark.gpu
STEPS = 50


def body(rank, world, accumulate, precision, user_backward):
    model = make_net()
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config(world, accumulate, **precision))
    assert engine.device.type == devices.NAME
    losses, norms = train_engine(engine, STEPS, rank, world, user_backward)
    return losses, norms, difference(model, plain_net(STEPS).model), engine.skipped_steps


@pytest.mark.parametrize("user_backward", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_fp32_on_the_device_equals_plain_training(accumulate, user_backward):
    expected = plain_net(STEPS)
    ((losses, norms, gap, _),) = run_ranks(1, body, accumulate, {}, user_backward)
    assert losses == pytest.approx(expected.means, rel=1e-5)
    assert norms == pytest.approx(expected.norms, rel=1e-4)
    assert gap < 1e-5


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_sixteen_bits_on_the_device(name):
    expected = plain_net(STEPS)
    ((losses, _, _, skipped),) = run_ranks(1, body, 2, {name: {"enabled": True}}, False)
    assert losses[-1] == pytest.approx(expected.means[-1], rel=0.05)
    assert skipped <= 16  # fp16 starts at 2**16 and finds its scale

"""ZeRO stages against one plain PyTorch process on the same data, over worlds, accumulation, dtypes and optimizers."""

import pytest

import devices
from engine_models import adam_like, config, difference, make_net, train_engine, train_plain
from harness import on_ranks
from runs import engine_of, together, weight_list

pytestmark = pytest.mark.any_device
STEPS = 10
STAGES = [1, 2, 3]


def stage_config(stage, world, accumulate=1, **more):
    zero = {
        "stage": stage,
        "reduce_bucket_size": 300,
        "allgather_bucket_size": 200,
        "stage3_param_persistence_threshold": 20,
        **dict(more.pop("zero", {})),
    }
    return config(world, accumulate, {3: 12}.get(world, 8), zero_optimization=zero, **more)


def full_copy(engine):
    """The model with whole parameters, whatever is sharded."""
    if engine.zero_optimization_stage() < 3:
        return engine.module
    copy = make_net()
    for mine, theirs in zip(copy.parameters(), weight_list(engine)):
        mine.data.copy_(theirs)
    return copy


def check(rank, world, stage, accumulate=2, user_backward=False, zero=(), sparse=False):
    size = {3: 12}.get(world, 8)
    engine = engine_of(make_net(sparse), stage_config(stage, world, accumulate, zero=zero))
    losses, norms = train_engine(engine, STEPS, rank, world, user_backward, size=size)
    expected, plain_norms, reference = train_plain(STEPS, adam_like, sparse=sparse, size=size)
    for step, own in enumerate(zip(*together(losses))):
        assert sum(own) / world == pytest.approx(expected[step], rel=1e-6), step
    assert norms == pytest.approx(plain_norms, rel=1e-5)
    assert difference(full_copy(engine), reference) < 1e-6


@pytest.mark.sample("values", 10)
@pytest.mark.parametrize("user_backward", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks()
def test_fp32_equals_plain_training(rank, world, stage, accumulate, user_backward):
    check(rank, world, stage, accumulate, user_backward)


@pytest.mark.sample("values", 8)
@pytest.mark.parametrize(
    "zero",
    [
        {"overlap_comm": True},
        {"overlap_comm": False},
        {"reduce_scatter": False},
        {"allgather_partitions": False},
        {"reduce_bucket_size": 10_000_000, "allgather_bucket_size": 10_000_000},
        {"contiguous_gradients": False, "round_robin_gradients": True},
    ],
    ids=lambda zero: ",".join(zero),
)
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_ways_to_communicate_are_equal(rank, world, stage, zero):
    check(rank, world, stage, zero=zero)


@pytest.mark.skipif(devices.NAME == "standin", reason="torch has no sparse tensors on PrivateUse1 devices")
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_sparse_gradients_are_summed(rank, world, stage):
    check(rank, world, stage, sparse=True)

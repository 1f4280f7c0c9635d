"""ZeRO stages against one plain PyTorch process on the same data, over worlds, accumulation, dtypes and optimizers."""

import pytest

import deepspeed
from engine_models import adam_like, config, difference, make_net, train_engine, train_plain
from harness import run_ranks
from runs import weight_list

STEPS = 10
STAGES = [1, 2, 3]


def stage_config(stage, world, accumulate=1, **more):
    zero = {
        "stage": stage,
        "reduce_bucket_size": 300,
        "allgather_bucket_size": 200,
        "stage3_param_persistence_threshold": 20,
        **more.pop("zero", {}),
    }
    size = {3: 12}.get(world, 8)
    return config(world, accumulate, size, zero_optimization=zero, **more)


def body_fp32(rank, world, stage, accumulate, user_backward, zero, sparse):
    size = {3: 12}.get(world, 8)
    model = make_net(sparse)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, config=stage_config(stage, world, accumulate, zero=zero)
    )
    losses, norms = train_engine(engine, STEPS, rank, world, user_backward, size=size)
    return losses, norms, difference(full_copy(engine), train_plain(STEPS, adam_like, sparse=sparse, size=size)[2])


def full_copy(engine):
    """The model with whole parameters, whatever is sharded."""
    if engine.zero_optimization_stage() < 3:
        return engine.module
    copy = make_net()
    for mine, theirs in zip(copy.parameters(), weight_list(engine)):
        mine.data.copy_(theirs)
    return copy


def check(results, world, sparse=False):
    losses, norms, _ = train_plain(STEPS, adam_like, sparse=sparse, size={3: 12}.get(world, 8))
    for step, expected in enumerate(losses):
        assert sum(r[0][step] for r in results) / world == pytest.approx(expected, rel=1e-6), step
    for _, found, gap in results:
        assert found == pytest.approx(norms, rel=1e-5)
        assert gap < 1e-6


@pytest.mark.parametrize("user_backward", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_fp32_equals_plain_training(stage, world, accumulate, user_backward):
    check(run_ranks(world, body_fp32, stage, accumulate, user_backward, {}, False), world)


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
def test_ways_to_communicate_are_equal(stage, zero):
    check(run_ranks(2, body_fp32, stage, 2, False, zero, False), 2)


@pytest.mark.parametrize("stage", STAGES)
def test_sparse_gradients_are_summed(stage):
    check(run_ranks(2, body_fp32, stage, 2, False, {}, True), 2, sparse=True)

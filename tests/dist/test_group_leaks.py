"""Groups that have ended leave nothing behind: no thread of gloo's, none of the store's."""

import gc
import os
import time

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.utils import groups
from engine_models import config, loss_on, make_net
from harness import on_ranks, run_ranks
from held_memory import segments, settled
from runs import engine_of, take_step


def threads():
    return len(os.listdir("/proc/self/task"))


def body(rank, world, most):
    torch.distributed.init_process_group("gloo")
    found = [None] * world
    dist.all_gather_object(found, rank)
    dist.barrier()
    torch.distributed.destroy_process_group()
    time.sleep(0.7)  # the watching thread has passed once more
    return settled(threads, most[rank])


def test_threads_of_ended_groups_end():
    counts = [run_ranks(2, body, [10**6] * 2) for _ in range(3)]
    counts.append(run_ranks(2, body, counts[1]))
    assert counts[-1] == counts[1], counts


def body_engine(rank, world, stage):
    before = threads()
    engine = engine_of(make_net(seed=0), config(world, zero_optimization={"stage": stage}))
    take_step(engine, loss_on(engine, 0))
    del engine  # and no destroy()
    for _ in range(3):
        gc.collect()
    groups.clear()
    dist.destroy_process_group()
    time.sleep(0.7)
    return before, settled(threads, before)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_engines_that_nobody_holds_let_go_of_their_groups(stage):
    run_ranks(2, body_engine, stage)  # threads that stay in the process come with the first run
    for before, after in run_ranks(2, body_engine, stage):
        assert after <= before


@on_ranks(2, init=True, fresh=True)
def test_groups_of_deepspeed_comm_take_their_memory_along(rank, world):
    def once():
        both, mine = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(world)][rank]
        x = torch.ones(100)
        dist.all_reduce(x, group=both)
        assert x.eq(2).all()
        dist.destroy_process_group(both)
        dist.destroy_process_group(mine)

    once()
    before = segments()
    for _ in range(20):
        once()
    time.sleep(0.3)  # the watch looks at a group for a moment
    settled(lambda: segments()[1], before[1])
    after = segments()
    assert after[0] == before[0] and after[1] <= before[1], (before, after)

"""Handles of deepspeed.comm's functions are torch's own: every member, of every verb, over gloo and through memory."""

import functools
import time
from datetime import timedelta

import pytest
import torch

from deepspeed import comm as dist
from harness import on_ranks
from refusals import refused

pytestmark = pytest.mark.dist

BOTH = pytest.mark.parametrize("init", ["gloo", True], ids=["gloo", "memory"])
WORLD = 2
ROWS = [torch.ones(2), torch.full((2,), 2.0)]  # the tensor of each rank
TOTAL, BOTH_ROWS = sum(ROWS), torch.cat(ROWS)


class Given:
    """The tensors of a rank: tensors to send, and tensors to receive into."""

    def __init__(self, rank):
        self.rank, self.root = rank, rank == 0
        self.mine, self.twice = ROWS[rank].clone(), ROWS[rank].repeat(2)
        self.wide = torch.full((2, 4), rank + 1.0)[:, ::2]
        self.one, self.two, self.all_of = torch.zeros(2), [torch.zeros(2), torch.zeros(2)], torch.zeros(4)


# verb -> the call, the caller's output tensors, and what they become
VERBS = {
    "all_reduce": lambda g, call: (call(g.mine), [g.mine], [TOTAL]),
    "strided": lambda g, call: (call(g.wide), [g.wide], [torch.full((2, 2), 3.0)]),  # of all_reduce
    "reduce": lambda g, call: (call(g.mine, 0), [g.mine], [TOTAL if g.root else ROWS[1]]),
    "broadcast": lambda g, call: (call(g.mine, 1), [g.mine], [ROWS[1]]),
    "reduce_scatter": lambda g, call: (call(g.one, [g.mine, g.mine]), [g.one], [TOTAL]),
    "reduce_scatter_tensor": lambda g, call: (call(g.one, g.twice), [g.one], [TOTAL]),
    "all_gather": lambda g, call: (call(g.two, g.mine), g.two, ROWS),
    "all_gather_into_tensor": lambda g, call: (call(g.all_of, g.mine), [g.all_of], [BOTH_ROWS]),
    "all_to_all": lambda g, call: (call(g.two, [g.mine, g.mine]), g.two, ROWS),
    "all_to_all_single": lambda g, call: (call(g.all_of, g.twice), [g.all_of], [BOTH_ROWS]),
    "gather": lambda g, call: (call(g.mine, g.two if g.root else None, 0), g.two[: 2 * g.root], ROWS[: 2 * g.root]),
    "scatter": lambda g, call: (call(g.one, ROWS if g.root else None, 0), [g.one], [ROWS[g.rank]]),
    "barrier": lambda g, call: (call(), [], []),
}


def started(verb, rank):
    """A handle, the caller's output tensors, and what they become."""
    return VERBS[verb](Given(rank), functools.partial(getattr(dist, verb, dist.all_reduce), async_op=True))


def same(found, outputs, expected):
    assert len(found) == len(outputs) == len(expected)
    for each, own, value in zip(found, outputs, expected, strict=True):
        assert each is own and torch.equal(each, value), (each, value)


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@BOTH
@on_ranks(WORLD, given=["init"])
def test_a_handle_has_torchs_members(rank, world):
    for verb in VERBS:
        work, outputs, expected = started(verb, rank)
        assert isinstance(work, torch.distributed.Work)
        assert work.wait() is True and work.wait(timedelta(seconds=5)) is True
        assert work.is_completed() is True and work.is_success() is True
        same(outputs, outputs, expected)
        same(work.result(), outputs, expected)
        same(work.get_future().value(), outputs, expected)
        assert work.synchronize() is None
        for source in (work.source_rank, work._source_rank):
            refused(RuntimeError, "recv", source)
        if hasattr(work, "boxed"):
            assert torch.distributed.Work.unbox(work.boxed()).is_completed()
        # Asked, not waited for: what is completed is in place.
        work, outputs, expected = started(verb, rank)
        until(work.is_completed)
        assert work.is_success()
        same(outputs, outputs, expected)


@BOTH
@on_ranks(WORLD, given=["init"])
def test_a_future_ends_though_nobody_waits_for_the_handle(rank, world):
    for verb in VERBS:
        work, outputs, expected = started(verb, rank)
        future = work.get_future()
        assert isinstance(future, torch._C.Future)
        del work  # nobody waits for it but the future
        seen = future.then(lambda done: [each.clone() for each in done.value()])
        same(future.wait(), outputs, expected)
        found = seen.wait()
        same(found, found, expected)
        assert future.done()
    # Many at once; waited for in another order and by both ways.
    begun = [started("all_reduce", rank) for _ in range(30)]
    futures = [work.get_future() for work, _, _ in begun]
    for index in reversed(range(0, 30, 2)):
        assert begun[index][0].wait()
    for future, (_, outputs, expected) in zip(futures, begun, strict=True):
        same(future.wait(), outputs, expected)
    # A callback that makes what torch's communication hooks make of it.
    halved = started("all_reduce", rank)[0].get_future().then(lambda done: done.value()[0] / world)
    assert halved.wait().tolist() == [1.5, 1.5]


@BOTH
@on_ranks(WORLD, given=["init"])
def test_a_wait_with_a_timeout_leaves_the_call_under_way(rank, world):
    x = torch.ones(4)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future()
        refused(RuntimeError, "Operation timed out", work.wait, timedelta(milliseconds=100))
        assert not work.is_completed() and not work.is_success() and not future.done()
        torch.distributed.distributed_c10d._get_default_store().set("go", "on")
        assert work.wait(timedelta(seconds=20)) and future.wait()[0] is x
    else:
        torch.distributed.distributed_c10d._get_default_store().get("go")
        assert dist.all_reduce(x, async_op=True).wait()
    assert x.tolist() == [2.0] * 4


@BOTH
@on_ranks(WORLD, given=["init"])
def test_a_failure_is_told_by_handle_and_future(rank, world):
    dist.barrier()
    call = dist.all_reduce if rank == 0 else functools.partial(dist.broadcast, src=0)
    works = [call(torch.ones(3), async_op=True) for _ in range(2)]
    future = works[0].get_future()
    for wait in (works[0].wait, works[0].wait, future.wait, future.value, works[1].wait, works[1].get_future().wait):
        refused(RuntimeError, "call different collectives", wait)
    for work in works:
        assert work.is_completed() and not work.is_success()

"""Messages between two ranks by deepspeed.comm: over gloo, beside shared memory, over the backend shm; tags, any
source, groups, strides, and what is wrong."""

import os
import time
from datetime import timedelta

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm import comms_log, group_communicators
from harness import RankError, on_ranks, run_ranks
from refusals import refused

pytestmark = pytest.mark.dist

WAYS = pytest.mark.parametrize("init", ["gloo", True, "shm"], ids=["gloo", "memory", "shm"])
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.complex64]


def value(rank, count, dtype=torch.float32):
    return (torch.arange(count) * 3 + rank * 7).remainder(5).to(dtype)


@WAYS
@pytest.mark.parametrize("world", [2, 3])
@on_ranks(given=["init"])
def test_messages_go_over_the_native_communicator(rank, world, init):
    assert group_communicators.of(None, torch.ones(1)).native.size == world
    after, before = (rank + 1) % world, (rank - 1) % world
    for dtype in DTYPES:
        for count in (0, 1, 5, 100_000):
            mine, found = value(rank, count, dtype), torch.empty(count, dtype=dtype)
            works = [dist.isend(mine, after, tag=3), dist.irecv(found, before, tag=3)]
            assert all(isinstance(work, torch.distributed.Work) for work in works)
            for work in works:
                assert work.wait() and work.wait() and work.is_completed()
            assert works[1].source_rank() == before
            assert torch.equal(found, value(before, count, dtype))
            if rank == 0:
                assert dist.send(mine, 1) is None
            elif rank == 1:
                assert dist.recv(found, 0) == 0
                assert torch.equal(found, value(0, count, dtype))


@WAYS
@on_ranks(3, given=["init"])
def test_tags_any_source_and_strides(rank, world, init):
    if rank == 0:  # the tag says which message is taken, not the order; within a tag the order counts
        for work in [dist.isend(torch.full((2,), 10.0 * tag + to), to, tag=tag) for to in (1, 2) for tag in (4, 5, 4)]:
            work.wait()
    else:
        found = torch.zeros(2, 4)[:, 1]  # of no contiguous memory
        for tag in (5, 4, 4):
            assert dist.recv(found, 0, tag=tag) == 0
            assert found.tolist() == [10.0 * tag + rank] * 2
    dist.barrier()
    if rank == 0:
        senders = set()
        for _ in range(2):
            found = torch.empty(3)
            sender = dist.recv(found)
            senders.add(sender)
            assert found.tolist() == [float(sender)] * 3
        assert senders == {1, 2}
        dist.barrier()
        work = dist.irecv(found)
        assert work.wait() and work.source_rank() == 2 and found.tolist() == [9.0] * 3
    else:
        wide = torch.full((3, 2), float(rank))
        wide[:, 1] = -1
        dist.send(wide[:, 0], 0)
        dist.barrier()
        if rank == 2:
            dist.send(torch.full((3,), 9.0), 0)


@WAYS
@on_ranks(4, given=["init"])
def test_messages_cross_and_name_global_ranks(rank, world, init):
    others = [other for other in range(world) if other != rank]
    boxes = {other: torch.empty(7) for other in others}
    order = others if rank % 2 else others[::-1]
    made = [dist.P2POp(dist.irecv, boxes[other], other) for other in order]
    made += [dist.P2POp(dist.isend, value(rank, 7), other) for other in order[::-1]]
    for work in reversed(dist.batch_isend_irecv(made)):
        work.wait()
    assert all(torch.equal(boxes[other], value(other, 7)) for other in others)
    group = dist.new_group([3, 1])
    if rank in (1, 3):
        found = torch.empty(2)
        works = [dist.isend(value(rank, 2), 4 - rank, group), dist.irecv(found, 4 - rank, group)]
        for work in works:
            work.wait()
        assert torch.equal(found, value(4 - rank, 2)) and works[1].source_rank() == (4 - rank == 3)
        if rank == 1:
            dist.send(value(1, 2), 3, group)
        else:
            assert dist.recv(found, None, group) == 1
        refused((ValueError, RuntimeError), "is not part of group", dist.isend, found, 2, group)
    # A collective that others have begun does not hold a message back.
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        dist.isend(torch.ones(1), 1).wait()
        work.wait()
    else:
        if rank == 1:
            assert dist.recv(torch.empty(1), 0) == 0
        dist.all_reduce(torch.ones(4))


@WAYS
@on_ranks(2, given=["init"])
def test_wrong_ranks_are_refused(rank, world, init):
    x = torch.ones(2)
    for call in (dist.send, dist.isend, dist.recv, dist.irecv):
        refused(ValueError, "no rank 7 in a group of 2", call, x, 7)
        refused(ValueError, f"rank {rank} is this rank itself", call, x, rank)
    work = dist.irecv(x, 1 - rank)
    assert not work.is_completed()
    refused(RuntimeError, "imed out", work.wait, timedelta(milliseconds=50))
    dist.send(torch.zeros(2), 1 - rank)
    assert work.wait() and x.tolist() == [0.0, 0.0]


@on_ranks(2, init=True)
def test_messages_are_logged_once_under_their_names(rank, world):
    dist.configure(enabled=True, prof_all=True, prof_ops=[], verbose=False, debug=False)
    dist.reset_log()
    x, other = torch.ones(4), 1 - rank
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.empty(4), other), dist.P2POp(dist.isend, x, other)])
    for work in works:
        work.wait()
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    found = {name: [size for size in sizes] for name, sizes in comms_log.comms_logger.get_raw_data().items()}
    dist.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)
    dist.reset_log()
    assert found == {"isend": [16], "irecv": [16], ("recv" if rank else "send"): [16]}


def end_in_silence(rank, world):
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    dist.barrier()
    if rank == 1:
        time.sleep(1)
        os._exit(3)
    began = time.monotonic()
    error = refused(RuntimeError, None, dist.recv, torch.empty(5), 1)
    assert time.monotonic() - began < 20
    text = str(error)
    assert "recv(5 x float32, from 1) failed on rank 0" in text, text
    assert "has ended" in text, text
    raise RuntimeError("told")


def test_a_rank_that_waits_for_a_message_of_one_that_has_ended():
    refused(RankError, "told", run_ranks, 2, end_in_silence, fresh=True, grace=20)


@WAYS
@on_ranks(2, given=["init"])
def test_calls_that_torch_serves(rank, world, init):
    wave = torch.full((3,), complex(1, rank))
    dist.all_reduce(wave)
    assert wave.tolist() == [complex(2, 1)] * 3
    rows = torch.sparse_coo_tensor([[rank]], [2.0], (2,))
    dist.all_reduce(rows, op=dist.ReduceOp.SUM, group=None, prof=True)
    assert rows.to_dense().tolist() == [2.0, 2.0]
    alone = dist.new_group([0])
    if rank == 1:
        found = torch.zeros(1)
        assert dist.recv(found, 0, alone) == -1 and dist.isend(found, 0, alone) is None
        assert dist.all_reduce(found, group=alone, async_op=True) is None

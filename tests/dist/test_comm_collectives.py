"""Every collective of deepspeed.comm, over gloo and through shared memory, against plain loops: dtypes x reductions x
world sizes x shapes."""

import functools
import itertools

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm import ReduceOp
from harness import on_ranks, run_ranks
from refusals import refused

pytestmark = pytest.mark.dist

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = FLOATS + INTEGERS + [torch.bool]
WORLDS = [1, 2, 3]
# Groups that torch makes, and those that deepspeed.comm makes, which have memory beside them.
BOTH = pytest.mark.parametrize("init", ["gloo", True], ids=["gloo", "memory"])


def values(rank, shape, dtype):
    """The contribution of a rank: small numbers, exact in every dtype, different for each rank and element."""
    return ((torch.arange(torch.Size(shape).numel()) * 3 + rank * 2 + 1) % 5).reshape(shape).to(dtype)


PAIRWISE = {
    ReduceOp.SUM: torch.add, ReduceOp.AVG: torch.add, ReduceOp.PRODUCT: torch.mul, ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum, ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}  # fmt: skip


def reference(contributions, op):
    """The reduction by a loop over ranks in exact arithmetic."""
    dtype = contributions[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    total = functools.reduce(PAIRWISE[op], [one.to(wide) for one in contributions])
    if op is ReduceOp.AVG and dtype != torch.bool:
        total = total / len(contributions) if dtype.is_floating_point else total // len(contributions)
    return (total != 0) if dtype == torch.bool else total.to(dtype)


def reductions(dtype):
    plain = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    return plain + ([] if dtype.is_floating_point else [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR])


def same(found, expected):
    """Two tensors, or two lists of tensors of one shape."""
    if isinstance(found, list):
        found, expected = torch.stack(found), torch.stack(expected)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found, expected), f"{found} is not {expected}"


# ---- reductions ---------------------------------------------------------------------------------------------------
REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in reductions(dtype)]


def received(function, shape, dtype, *given, **more):
    """An empty tensor after a collective has filled it."""
    found = torch.empty(shape, dtype=dtype)
    work = function(found, *given, **more)
    if work is not None:
        work.wait()
    return found


def _all_reduce(rank, world):
    for (dtype, op), shape in itertools.product(REDUCTIONS, ((), (1,), (7,), (3, 5))):
        mine = values(rank, shape, dtype)
        expected = reference([values(r, shape, dtype) for r in range(world)], op)
        for function in (dist.all_reduce, dist.inference_all_reduce):
            found = mine.clone()
            assert function(found, op=op) is None
            same(found, expected)
        found = mine.clone()
        work = dist.all_reduce(found, op, async_op=True)
        work.wait()
        assert work.is_completed()
        same(found, expected)


def _reduce(rank, world):
    for (dtype, op), dst in itertools.product(REDUCTIONS, range(world)):
        found = values(rank, (6,), dtype)
        dist.reduce(found, dst, op=op)
        if rank == dst:
            same(found, reference([values(r, (6,), dtype) for r in range(world)], op))


def _reduce_scatter(rank, world):
    for (dtype, op), part in itertools.product(REDUCTIONS, ((1,), (5,), (2, 3))):
        whole = (world * part[0], *part[1:])
        total = reference([values(r, whole, dtype) for r in range(world)], op)
        expected = total.chunk(world)[rank].reshape(part)
        mine = values(rank, whole, dtype)
        for function in (dist.reduce_scatter_tensor, dist.reduce_scatter_fn):
            same(received(function, part, dtype, mine.clone(), op=op), expected)
        same(received(dist.reduce_scatter, part, dtype, list(mine.clone().chunk(world)), op=op), expected)
        same(received(dist.reduce_scatter_tensor, part, dtype, mine.clone(), op=op, async_op=True), expected)


def _large(rank, world):
    dtypes, ops = (torch.float32, torch.bfloat16), (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX)
    for count, dtype, op in itertools.product((1 << 16, (1 << 16) + 1), dtypes, ops):
        expected = reference([values(r, (count,), dtype) for r in range(world)], op)
        for found in (values(rank, (count,), dtype), torch.zeros(count, 2, dtype=dtype)[:, 0]):
            if not found.is_contiguous() and dtype == torch.float32:
                continue  # torch's own refusal
            found.copy_(values(rank, (count,), dtype))
            dist.all_reduce(found, op)
            same(found, expected)


def _coalesced(rank, world):
    tensors = [values(rank, (n,), dtype) for n, dtype in ((3, torch.float32), (4, torch.bfloat16), (1, torch.int16))]
    expected = [reference([values(r, t.shape, t.dtype) for r in range(world)], ReduceOp.SUM) for t in tensors]
    dist.all_reduce_coalesced(tensors)
    for found, wanted in zip(tensors, expected, strict=True):
        same(found, wanted)
    inputs = [values(rank, (n,), torch.bfloat16) for n in (2, 5)]
    outputs = [torch.empty(n * world, dtype=torch.bfloat16) for n in (2, 5)]
    dist.all_gather_coalesced(outputs, inputs, async_op=True).wait()
    for n, found in zip((2, 5), outputs, strict=True):
        same(found, torch.cat([values(r, (n,), torch.bfloat16) for r in range(world)]))
    refused(ValueError, "1 outputs for 2 inputs", dist.all_gather_coalesced, outputs[:1], inputs)


# ---- data movement ------------------------------------------------------------------------------------------------
def _movement(rank, world):
    for dtype, shape in itertools.product(DTYPES, ((), (1,), (4,), (2, 3))):
        everyones = [values(r, shape, dtype) for r in range(world)]
        for src in range(world):
            found = everyones[rank].clone()
            dist.broadcast(found, src)
            same(found, everyones[src])
        found = [torch.empty(shape, dtype=dtype) for _ in range(world)]
        dist.all_gather(found, everyones[rank])
        same(found, everyones)
        found = [torch.empty(shape, dtype=dtype) for _ in range(world)]
        dist.gather(everyones[rank], found if rank == world - 1 else None, dst=world - 1)
        if rank == world - 1:
            same(found, everyones)
        same(received(dist.scatter, shape, dtype, everyones if rank == 0 else None, src=0), everyones[rank])


def _gather_into_tensor(rank, world):
    for dtype in DTYPES:
        functions = (dist.all_gather_into_tensor, dist.allgather_fn)
        for function, shape in itertools.product(functions, ((1,), (5,), (2, 3))):
            everyones = [values(r, shape, dtype) for r in range(world)]
            whole = received(function, (world * shape[0], *shape[1:]), dtype, everyones[rank])
            same(whole, torch.cat(everyones))
            stacked = received(function, (world, *shape), dtype, everyones[rank])  # not one behind the other
            same(stacked, torch.stack(everyones))
        # The input may be this rank's part of the output.
        found = torch.zeros(world, 3, dtype=dtype)
        found[rank] = values(rank, (3,), dtype)
        dist.all_gather_into_tensor(found.view(-1), found[rank])
        same(found, torch.stack([values(r, (3,), dtype) for r in range(world)]))


def _all_to_all(rank, world):
    for dtype in DTYPES:
        for tail in ((), (3,)):
            everyones = [values(r, (2 * world, *tail), dtype) for r in range(world)]
            found = received(dist.all_to_all_single, (2 * world, *tail), dtype, everyones[rank])
            same(found, torch.cat([one[2 * rank : 2 * rank + 2] for one in everyones]))
            # Rank r sends r + 1 rows to each.
            mine = values(rank, ((rank + 1) * world, *tail), dtype)
            rows = [r + 1 for r in range(world)]
            found = received(dist.all_to_all_single, (sum(rows), *tail), dtype, mine, rows, [rank + 1] * world)
            parts = [
                values(r, ((r + 1) * world, *tail), dtype)[(r + 1) * rank : (r + 1) * (rank + 1)] for r in range(world)
            ]
            same(found, torch.cat(parts))
        inputs = [values(10 * rank + r, (r + 1, 2), dtype) for r in range(world)]
        outputs = [torch.empty(rank + 1, 2, dtype=dtype) for _ in range(world)]
        dist.all_to_all(outputs, inputs)
        same(outputs, [values(10 * r + rank, (rank + 1, 2), dtype) for r in range(world)])


def _objects(rank, world):
    found = [None] * world
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": r, "text": "x" * r} for r in range(world)]
    found = [("a", 1), [2]] if rank == world - 1 else [None, None]
    dist.broadcast_object_list(found, src=world - 1)
    assert found == [("a", 1), [2]]


def _empty(rank, world):
    for dtype in (torch.float32, torch.bfloat16):
        nothing = torch.empty(0, dtype=dtype)
        dist.all_reduce(nothing)
        dist.reduce(nothing, 0)
        dist.broadcast(nothing, 0)
        dist.all_gather([nothing] * world, nothing)
        dist.gather(nothing, [nothing] * world if rank == 0 else None, dst=0)
        dist.scatter(nothing, [nothing] * world if rank == 0 else None, src=0)
        dist.all_gather_into_tensor(nothing, nothing, async_op=True).wait()
        dist.reduce_scatter_tensor(nothing, nothing)
        dist.all_to_all_single(nothing, nothing)
        dist.all_to_all([nothing] * world, [nothing] * world)
        # Only rank 0 has something, for the last rank.
        mine = torch.full((2,) if rank == 0 else (0,), 7.0, dtype=dtype)
        last = rank == world - 1
        found = torch.empty(2 if last else 0, dtype=dtype)
        sizes = (
            [2 if last and r == 0 else 0 for r in range(world)],
            [2 if rank == 0 and r == world - 1 else 0 for r in range(world)],
        )
        dist.all_to_all_single(found, mine, *sizes)
        assert found.tolist() == ([7.0, 7.0] if last else [])


def _meeting(rank, world):
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier()


@pytest.mark.sample("values", 16)
@BOTH
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "body",
    [
        _all_reduce,
        _reduce,
        _reduce_scatter,
        _large,
        _coalesced,
        _movement,
        _gather_into_tensor,
        _all_to_all,
        _objects,
        _empty,
        _meeting,
    ],
    ids=lambda body: body.__name__.strip("_"),
)
def test_collective(body, world, init):
    run_ranks(world, body, init=init)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks(init="gloo")
def test_point_to_point(rank, world):
    for dtype in DTYPES:
        mine, found = values(rank, (5,), dtype), torch.empty(5, dtype=dtype)
        after, before = (rank + 1) % world, (rank - 1) % world
        works = [dist.isend(mine, after, tag=3), dist.irecv(found, before, tag=3)]
        for work in works:
            work.wait()
        same(found, values(before, (5,), dtype))
        if rank == 0:
            dist.send(mine, 1)
        elif rank == 1:
            found = torch.empty(5, dtype=dtype)
            assert dist.recv(found) == 0
            same(found, values(0, (5,), dtype))


@BOTH
@on_ranks(3, given=["init"])
def test_low_precision_sums_are_wide(rank, world):
    # 256 + 1 + 1 is 258 in fp32; bf16 additions would lose both ones.
    mine = torch.full((world,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    found = mine.clone()
    dist.all_reduce(found)
    assert found.tolist() == [258.0] * world
    part = torch.empty(1, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(part, mine)
    assert part.tolist() == [258.0]


@BOTH
@on_ranks(2, given=["init"])
def test_bad_input(rank, world):
    refused(ValueError, "7 elements.*must have 8", dist.reduce_scatter_tensor, torch.empty(4), torch.empty(7))
    refused(ValueError, "output has 7.*must have 8", dist.all_gather_into_tensor, torch.empty(7), torch.empty(4))
    across = torch.full((4, 3), float(rank), dtype=torch.bfloat16).t()
    dist.broadcast(across, 0)
    assert not across.any()
    refused(ValueError, "not a reduction", dist.all_reduce, torch.empty(2), op=ReduceOp.UNUSED)
    refused(ValueError, "not a reduction", dist.all_reduce, torch.empty(2), op="sum")


@BOTH
@on_ranks(2, given=["init"])
def test_torchs_own_operations_are_accepted(rank, world):
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        ours, theirs = values(rank, (4,), torch.bfloat16), values(rank, (4,), torch.bfloat16)
        dist.all_reduce(ours, getattr(ReduceOp, name))
        dist.all_reduce(theirs, getattr(torch.distributed.ReduceOp, name))
        same(ours, theirs)

"""Every verb of the core's communicators over torch's gloo groups, alone and with shared memory beside, in random
sequences with even and uneven counts, against a serial model. Other transports: tests/cpp/comm/verbs_test.cpp."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from deepspeed import _native
from harness import on_ranks
from refusals import refused

VERBS = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all", "gather", "scatter", "ring")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.int16, torch.float64)
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def given(verb, op, turn, rank, count):
    numbers = torch.arange(count) * 7 + turn * 3 + rank * 5
    return numbers % 2 + 1 if op == "product" and "reduce" in verb else numbers % 11


def reduced(verb, op, turn, world, count, dtype):
    rows = [given(verb, op, turn, rank, count) for rank in range(world)]
    total = rows[0]
    for row in rows[1:]:
        total = {
            "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
            "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
        }[op](total, row)  # fmt: skip
    if op != "avg":
        return total
    if not dtype.is_floating_point:
        return torch.div(total, world, rounding_mode="trunc")
    return total.to(torch.float64 if dtype == torch.float64 else torch.float32) / world


def one(comm, draw, turn, rank, world):
    """Issues a call; returns its handles and what checks the result."""
    verb, op, dtype, root, count, uneven = draw
    parts = [(r * 7 + turn) % 3 * count // 2 if uneven else count for r in range(world)]
    begin = list(itertools.accumulate(parts, initial=0))
    mine = lambda numel: given(verb, op, turn, rank, numel).to(dtype)  # noqa: E731
    empty = lambda numel: torch.empty(numel, dtype=dtype)  # noqa: E731
    same = lambda found, expected: torch.equal(found, expected.to(dtype))  # noqa: E731
    counts, own = (parts if uneven else []), slice(begin[rank], begin[rank + 1])
    if verb in ("all_reduce", "reduce", "broadcast"):
        out, is_root = mine(count), rank == root
        work = comm.run(verb, None, out, op=op, peer=root, tag=f"turn {turn}")
        if verb == "broadcast":
            return [work], lambda: same(out, given(verb, op, turn, root, count))
        has = is_root or verb == "all_reduce"
        expected = reduced(verb, op, turn, world, count, dtype) if has else given(verb, op, turn, rank, count)
        return [work], lambda: same(out, expected)
    if verb == "reduce_scatter":
        out = empty(parts[rank])
        work = comm.run(verb, mine(begin[-1]), out, (counts, []), op)
        return [work], lambda: same(out, reduced(verb, op, turn, world, begin[-1], dtype)[own])
    if verb in ("all_gather", "gather"):
        has = verb == "all_gather" or rank == root
        out = empty(begin[-1]) if has else None
        work = comm.run(verb, mine(parts[rank]), out, ([], counts), peer=root)
        expected = torch.cat([given(verb, op, turn, r, parts[r]) for r in range(world)])
        return [work], lambda: not has or same(out, expected)
    if verb == "scatter":
        out = empty(parts[rank])
        work = comm.run(verb, mine(begin[-1]) if rank == root else None, out, (counts, []), peer=root)
        return [work], lambda: same(out, given(verb, op, turn, root, begin[-1])[own])
    if verb == "all_to_all":
        size = lambda a, b: (a + 2 * b + turn) % 3 * count // 2 if uneven else count  # noqa: E731
        give, take = [size(rank, r) for r in range(world)], [size(r, rank) for r in range(world)]
        out = empty(sum(take))
        work = comm.run(verb, mine(sum(give)), out, (give, take) if uneven else ([], []))
        found = []
        for r in range(world):
            theirs = [size(r, to) for to in range(world)]
            start = sum(theirs[:rank])
            found.append(given(verb, op, turn, r, sum(theirs))[start : start + take[r]])
        return [work], lambda: same(out, torch.cat(found))
    out, last = empty(count), (rank - 1) % world
    works = [comm.run("recv", None, out, peer=last), comm.run("send", mine(count), peer=(rank + 1) % world)]
    return works, lambda: same(out, given(verb, op, turn, last, count))


def finish(draw, works, correct):
    for work in works:
        work.wait()
    assert correct(), draw


@pytest.mark.sample("values")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_ranks(init=True)
def test_random_sequences_equal_a_serial_model(rank, world, shared):
    name = "shm" if shared and world > 1 else "gloo"
    comm = _native._C.Communicator(dist.group.WORLD, shared=shared)
    draws, own = random.Random(world), random.Random(100 + rank)
    waiting = []
    for turn in range(120):
        verb, op, dtype = draws.choice(VERBS), draws.choice(OPS), draws.choice(DTYPES)
        op = op if op not in OPS[5:] or not dtype.is_floating_point else "sum"
        count, root = draws.randrange(draws.choice((100, 100, 30000))), draws.randrange(world)
        uneven = draws.random() < 0.5
        if world == 1 and verb == "ring":
            continue
        draw = (verb, op, dtype, root, count, uneven)
        waiting.append((draw, *one(comm, draw, turn, rank, world)))
        while len(waiting) > 3 or (waiting and draws.random() < 0.5):
            finish(*waiting.pop(own.randrange(len(waiting))))
    while waiting:
        finish(*waiting.pop())
    comm.run("barrier").wait()
    assert comm.name == name


@on_ranks(2, init=True)
def test_what_does_not_fit_is_refused_before_anything_is_sent(rank, world):
    comm = _native._C.Communicator(dist.group.WORLD)
    for arguments, text in (
        (("allreduce", None, torch.ones(1)), "there is no collective 'allreduce'"),
        (("all_reduce", None, torch.ones(2), ([], []), "mean"), "there is no reduction 'mean'"),
        (("all_reduce", None, torch.ones(4, 4).t()), "contiguous"),
        (("all_reduce", torch.ones(2)), "all_reduce: output is missing"),
        (("all_gather", torch.ones(2), torch.ones(3)), "all_gather: 3 elements for 2 rows of 2"),
        (("broadcast", None, torch.ones(2), ([], []), "sum", 7), "there is no rank 7 in a group of 2 ranks"),
    ):
        refused(ValueError, text, comm.run, *arguments)

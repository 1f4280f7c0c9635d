"""The backend ``shm``: every collective against a serial model, DDP, groups, and ranks that go wrong."""

import json
import logging
import os
import pathlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import deepspeed
import deepspeed.comm
from engine_models import after_steps, config, make_net, train_engine
from harness import RankError, on_ranks, run_ranks
from logs import logged
from models import two_layers
from other_call import other_call
from refusals import refused
from runs import engine_of, together

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]


def given(rank, numel, dtype, salt=0):
    """Whole numbers that every dtype holds, as do their sums over four ranks."""
    values = (torch.arange(numel) * 7 + rank * 5 + salt) % 11
    return values % 2 == 1 if dtype is torch.bool else values.to(dtype)


def total(world, numel, dtype, salt=0):
    wide = torch.stack([given(rank, numel, dtype, salt).double() for rank in range(world)])
    return wide.max(0).values.to(dtype) if dtype is torch.bool else wide.sum(0).to(dtype)


@pytest.mark.parametrize("world", [2, 3, 4])
@on_ranks(timeout=120)
def test_every_collective_and_dtype(rank, world):
    deepspeed.init_distributed(dist_backend="shm")
    assert dist.get_backend() == "shm"
    for dtype in TYPES:
        for numel in (0, 1, 37, 5000, 200001):
            mine = given(rank, numel, dtype)
            out = mine.clone()
            dist.all_reduce(out)
            assert torch.equal(out, total(world, numel, dtype)), ("all_reduce", dtype, numel)
            out = mine.clone()
            dist.reduce(out, 1)
            assert torch.equal(out, total(world, numel, dtype) if rank == 1 else mine), ("reduce", dtype, numel)
            out = mine.clone()
            dist.broadcast(out, world - 1)
            assert torch.equal(out, given(world - 1, numel, dtype))
            outs = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(outs, mine)
            assert all(torch.equal(outs[r], given(r, numel, dtype)) for r in range(world))
            flat = torch.empty(world * numel, dtype=dtype)
            deepspeed.comm.all_gather_into_tensor(flat, mine)
            assert torch.equal(flat, torch.cat(outs))
            rows = [given(rank, numel, dtype, salt) for salt in range(world)]
            out = torch.empty_like(mine)
            dist.reduce_scatter(out, rows)
            assert torch.equal(out, total(world, numel, dtype, rank)), ("reduce_scatter", dtype, numel)
            out = torch.empty_like(mine)
            deepspeed.comm.reduce_scatter_tensor(out, torch.cat(rows))
            assert torch.equal(out, total(world, numel, dtype, rank))
            outs = [torch.empty_like(mine) for _ in range(world)]
            dist.all_to_all(outs, rows)
            assert all(torch.equal(outs[r], given(r, numel, dtype, rank)) for r in range(world))
            outs = [torch.empty_like(mine) for _ in range(world)] if rank == 0 else None
            dist.gather(mine, outs, dst=0)
            assert rank != 0 or all(torch.equal(outs[r], given(r, numel, dtype)) for r in range(world))
            out = torch.empty_like(mine)
            dist.scatter(out, rows if rank == 1 else None, src=1)
            assert torch.equal(out, given(1, numel, dtype, rank))


@on_ranks(2)
def test_odds_and_ends(rank, world):
    deepspeed.init_distributed(dist_backend="shm")
    half = torch.full((3,), rank + 1.0, dtype=torch.bfloat16)
    dist.all_reduce(half, op=dist.ReduceOp.AVG)
    assert half.tolist() == [1.5] * 3
    for op, expected in (("PRODUCT", 6), ("MIN", 2), ("MAX", 3), ("BAND", 2), ("BOR", 3), ("BXOR", 1)):
        value = torch.tensor([2 + rank])
        dist.all_reduce(value, op=getattr(dist.ReduceOp, op))
        assert value.item() == expected, op
    refused((RuntimeError, TypeError), "bitwise and", dist.all_reduce, torch.ones(2), op=dist.ReduceOp.BAND)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    deepspeed.init_distributed(dist_backend="shm")
    # Not contiguous; asynchronous, waited for in another order; uneven all_to_all; objects; point to point.
    wide = torch.zeros(4, 6)
    wide[:, ::2] = rank + 1
    dist.all_reduce(wide[:, ::2])
    assert wide[:, ::2].eq(3).all() and wide[:, 1::2].eq(0).all()
    values = [torch.full((1000,), float(i + rank)) for i in range(20)]
    works = [dist.all_reduce(value, async_op=True) for value in values]
    for i in reversed(range(20)):
        works[i].wait()
        assert works[i].is_completed() and values[i].eq(2 * i + 1).all()
    assert dist.all_reduce(torch.ones(5), async_op=True).get_future().wait()[0].tolist() == [2.0] * 5
    out = torch.empty(3 + rank)
    given = [1, 2] if rank == 0 else [2, 2]
    dist.all_to_all_single(out, torch.arange(3.0 + rank), given, given)
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == [0, 1]
    box = torch.full((2,), float(rank))
    dist.send(box, 1) if rank == 0 else dist.recv(box, 0)
    assert box.tolist() == [0.0, 0.0]
    alone = [dist.new_group([r]) for r in range(world)][rank]
    one = torch.ones(1)
    dist.all_reduce(one, group=alone)
    assert one.item() == 1.0
    dist.barrier()


@on_ranks(2)
def test_ddp_on_it_equals_one_process(rank, world):
    deepspeed.init_distributed(dist_backend="shm")
    model, plain = two_layers(6, 20, 3), two_layers(6, 20, 3)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(5):
        x = torch.randn(4 * world, 6, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        wrapped(x[rank * 4 : rank * 4 + 4]).square().mean().backward()
        plain(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), plain.parameters()))
    first, second = together([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def carrier_of_engine(rank, world):
    engine = engine_of(make_net(), config(world, 1, zero_optimization={"stage": 2}))
    losses, _ = train_engine(engine, 4, rank, world)
    return engine.core.communicator, losses


def test_the_engine_uses_it_by_itself():
    shared = run_ranks(2, carrier_of_engine, init=True)
    plain = run_ranks(2, carrier_of_engine, init=True, env={"DS_SHM_COLLECTIVES": "0"})
    assert [name for name, _ in shared] == ["shm", "shm"]
    assert "shm" not in [name for name, _ in plain]
    for (_, ours), (_, theirs) in zip(shared, plain):
        assert ours == pytest.approx(theirs, rel=1e-6)


@on_ranks(2, init=True, fresh=True)  # the record of a process
def test_the_flight_record_has_names_of_parameters(rank, world):
    assert deepspeed.comm.flight_record() == []
    engine = after_steps(
        engine_of(make_net(), config(world, 1, zero_optimization={"stage": 2}, comm={"timeout": 77})), 4, rank, world
    )
    names = {name for name, _ in engine.module.named_parameters()}
    flights = deepspeed.comm.flight_record()
    assert [f["began"] for f in flights] == sorted(f["began"] for f in flights)
    assert {f["state"] for f in flights} == {"done"} and all(f["seconds"] >= 0 for f in flights)
    assert all(f["tag"] for f in flights if f["op"] != "barrier"), flights
    assert {f["tag"] for f in flights if f["op"] == "reduce_scatter"} <= names
    assert {f["group"] for f in flights} == {"data parallel"}
    group = dist.new_group(backend="shm")
    for _ in range(300):
        dist.barrier(group=group)
    assert len(deepspeed.comm.flight_record()) == 256
    assert deepspeed.comm.timeouts.default_timeout().total_seconds() == 77.0


def default_timeouts(rank, world):
    os.environ["DS_COMM_TIMEOUT_S"] = "1.5"
    deepspeed.init_distributed(dist_backend="shm", config={"comm": {"timeout": 600}})
    begin = time.monotonic()
    if rank == 0:
        refused(RuntimeError, "has not come for 1 s", dist.barrier)
        return time.monotonic() - begin
    time.sleep(3.5)
    return 0.0


@pytest.mark.alone
def test_the_environment_sets_the_patience_of_torchs_groups():
    assert 1.5 <= run_ranks(2, default_timeouts, fresh=True)[0] < 3.4


@pytest.mark.alone
@on_ranks(3)
def test_a_slow_rank_is_named_once_and_waited_for(rank, world):
    value = torch.zeros(100)
    with logged(logging.WARNING) as lines:
        deepspeed.init_distributed(dist_backend="shm")
        begin = time.monotonic()
        while not value[0]:
            time.sleep(0.2 if rank == 1 else 0.01)
            value.fill_(float(time.monotonic() - begin > 8))
            dist.broadcast(value, 0)
        time.sleep(0.3)
    first, second, third = together(lines)
    assert (second, third) == ([], []) and len(first) == 1
    assert "rank 1 is slow" in first[0] and "have waited" in first[0]


@on_ranks(2)
def test_ranks_that_share_no_memory_go_through_gloo(rank, world):
    os.environ["DS_PEER_MEMORY"] = "0"  # as if the ranks were on several hosts
    deepspeed.init_distributed(dist_backend="shm")
    value = torch.full((4,), float(rank))
    dist.all_reduce(value)
    dist.barrier()
    assert value.tolist() == [1.0] * 4


@on_ranks(2, timeout=40)
def test_gloo_beside_it_may_let_go_of_tensors_while_the_group_ends(rank, world):
    os.environ["DS_PEER_MEMORY"] = "0"
    deepspeed.init_distributed(dist_backend="shm", verbose=False)
    for _ in range(3):
        group = dist.new_group([0, 1])
        for _ in range(3):
            dist.all_reduce(torch.ones(4 << 20), group=group, async_op=True)  # nobody but gloo holds the tensor
        dist.destroy_process_group(group)
        del group


# ---- what goes wrong -------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def traces(tmp_path, monkeypatch):
    """The folder into which the ranks write their flight records."""
    monkeypatch.setenv("DS_COMM_TRACE_DIR", str(tmp_path))
    return tmp_path


def faulty(rank, world, fault):
    deepspeed.init_distributed(dist_backend="shm", timeout=timedelta(seconds=3))
    dist.all_reduce(torch.ones(10))
    started = time.monotonic()
    try:
        other_call(dist, rank, fault, 1 if fault == "slow" else 6)
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    except ValueError:
        dist.destroy_process_group()
        return "raised", 0.0
    return "fine", time.monotonic() - started


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["skip", "shape", "dtype", "order"])
def test_a_mismatch_names_ranks_and_calls_on_all_of_them(fault):
    called = {
        "skip": "rank 1 barrier()",
        "shape": "rank 1 all_reduce(11 x float32, sum)",
        "dtype": "rank 1 all_reduce(10 x float64, sum)",
        "order": "rank 1 broadcast(10 x float32, root 0)",
    }[fault]
    for text, seconds in run_ranks(3, faulty, fault):
        assert called in text and "rank 0 all_reduce(10 x float32, sum)" in text
        assert seconds < 1
        stack = text[text.index("rank 1 (process") :]
        assert "other_call.py" in stack and "in other_call: dist." in stack  # the line of each rank's script
        assert "number 2, for 0." in text


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["exception", "endless"])
def test_a_rank_that_does_not_come_is_named(fault):
    results = run_ranks(3, faulty, fault)
    for text, seconds in (results[0], results[2]):
        assert "rank 1 (process" in text and "all_reduce(10 x float32, sum)" in text
        assert ("has destroyed its process group" if fault == "exception" else "has not come for 3 s") in text
        assert seconds < (1 if fault == "exception" else 5)
        if fault == "endless":
            assert "outside of collectives; all_reduce(10 x float32, sum), number 1, its last, ended 3." in text
            assert "in other_call: time.sleep(seconds)" in text


@pytest.mark.alone
def test_a_rank_that_cannot_answer_is_told_from_one_that_can(traces):
    results = run_ranks(3, faulty, "deaf")
    for text, seconds in (results[0], results[2]):
        assert "rank 1 (process" in text and "it does not answer: its interpreter is busy" in text
        assert "in other_call: dist.all_reduce(torch.ones(10, device=device))" in text and seconds < 3 + 5
    files = list(traces.iterdir())
    assert len(files) == 2
    for path in files:
        assert str(path) in results[0][0] + results[2][0]
        found = json.loads(path.read_text())
        assert [each["rank"] for each in found["ranks"]] == [0, 1, 2] and "has not come for 3 s" in found["why"]
        flights = found["ranks"][0]["flights"]
        assert [f["number"] for f in flights] == [1, 2] and [f["state"] for f in flights] == ["done", "under way"]
        assert {f["op"] for f in flights} == {"all_reduce"} and flights[1]["numel"] == 10
        assert len(found["ranks"][1]["flights"]) == 1  # also of the rank that says nothing


def survivors(rank, world, folder):
    found = faulty(rank, world, "killed")
    pathlib.Path(folder, str(rank)).write_text(f"{found[1]:.3f} {found[0]}", encoding="utf-8")


@pytest.mark.alone
def test_a_killed_rank_is_named(tmp_path):
    refused(RankError, "SIGKILL", run_ranks, 3, survivors, str(tmp_path), grace=15)
    for rank in (0, 2):
        seconds, text = (tmp_path / str(rank)).read_text(encoding="utf-8").split(" ", 1)
        assert "rank 1 (process" in text and "has ended" in text and float(seconds) < 2


@pytest.mark.alone
def test_a_slow_rank_is_waited_for():
    assert [text for text, _ in run_ranks(3, faulty, "slow")] == ["fine"] * 3


@on_ranks(2, init="shm", timeout=20)
def test_a_group_that_ends_with_collectives_under_way_ends(rank, world):
    dist.barrier()
    value = torch.ones(1000)
    value.name_of_mine = "a tensor that Python knows"
    if rank == 1:
        time.sleep(0.3)
    dist.all_reduce(value, async_op=True)
    del value
    dist.destroy_process_group()  # waits for the thread that runs the collective and lets go of the tensor

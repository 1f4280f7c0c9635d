"""The log of operations on several ranks: what is counted, who waits for whom, what the engine sends."""

import contextlib
import datetime
import io
import json
import os
import pathlib
import time
import unittest.mock

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed._compat import TORCH2
from deepspeed.comm import comms_log
from engine_models import after_steps, config, make_net, train_engine
from harness import on_ranks
from refusals import refused
from runs import engine_of, together


def counts():
    """{operation: {bytes: count}}."""
    summary = dist.log_summary(return_dict=True).get("summary", {})
    return {name: {size: row["count"] for size, row in sizes.items()} for name, sizes in summary.items()}


def fresh(**settings):
    dist.configure(enabled=True, prof_all=True, prof_ops=[], verbose=False, debug=False)
    dist.configure(**settings)
    dist.reset_log()


def off():
    dist.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)
    dist.reset_log()


@pytest.mark.parametrize("world", [2, 4])
@on_ranks(init=True)
def test_what_is_counted(rank, world):
    fresh()
    x, parts = torch.ones(8), [torch.ones(8) for _ in range(world)]
    for _ in range(3):
        dist.all_reduce(x)
    torch.distributed.all_reduce(x)  # counted as well
    dist.all_reduce(x.bfloat16())  # and this once, whatever it is made of
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(torch.empty(8 * world), x)
    dist.reduce_scatter_tensor(torch.empty(8 // world), x)
    dist.reduce_scatter(torch.empty(8), parts)
    dist.all_to_all(parts, [torch.ones(8) for _ in range(world)])
    dist.all_to_all_single(torch.empty(8), x)
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.all_reduce_coalesced([x, torch.ones(4)])
    dist.inference_all_reduce(x, log_name="mine")
    dist.barrier()
    dist.all_gather_object([None] * world, "text")
    works = [dist.isend(x, (rank + 1) % world), dist.irecv(torch.empty(8), (rank - 1) % world)]
    assert dist.get_comm_operation_count() == 17  # those two are not over yet
    for work in works:
        work.wait()
        work.wait()
    assert dist.all_reduce(x, async_op=True).wait() is not None
    expected = {
        "all_reduce": {32: 5, 16: 1, 48: 1},
        "all_gather": {32: 1},
        "all_gather_into_tensor": {32: 1},
        "reduce_scatter_tensor": {32: 1},
        "reduce_scatter": {32 * world: 1},
        "all_to_all": {32 * world: 1},
        "all_to_all_single": {32: 1},
        "broadcast": {32: 1},
        "reduce": {32: 1},
        "mine": {32: 1},
        "barrier": {0: 1},
        "all_gather_object": {0: 1},
        "isend": {32: 1},
        "irecv": {32: 1},
    }
    assert counts() == expected and sorted(dist.get_logged_comm_ops()) == sorted(expected)
    for sizes in comms_log.comms_logger.get_raw_data().values():
        for count, *values in sizes.values():
            assert all(len(one) == count for one in values) and all(ms > 0 for ms in values[0])
    off()
    dist.all_reduce(x)
    torch.distributed.all_reduce(x)
    assert not dist.has_comm_data() and dist.get_comm_operation_count() == 0


@on_ranks(2, init=True)
def test_filters_groups_and_callers(rank, world):
    x = torch.ones(8)
    fresh(prof_all=False, prof_ops=["broadcast"])
    dist.all_reduce(x)
    dist.all_reduce(x, prof=True, log_name="asked")
    dist.broadcast(x, 0)
    dist.reduce_scatter_tensor(torch.empty(8 // world), x)  # made of an all_to_all_single, which is not wanted either
    torch.distributed.broadcast(x, 0)
    assert counts() == {"asked": {32: 1}, "broadcast": {32: 2}}
    half = dist.new_group([0])
    fresh()
    dist.all_reduce(x, group=half)  # rank 1 is not in it
    assert counts() == ({"all_reduce": {32: 1}} if rank == 0 else {})

    def who():
        dist.all_reduce(x)
        torch.distributed.all_reduce(x)
        dist.broadcast(x, 0, debug="somebody")

    fresh(debug=True)
    who()
    assert counts() == {
        "all_reduce | [Caller Func: who]": {32: 2},
        "broadcast | [Caller Func: somebody]": {32: 1},
    }
    off()


@pytest.mark.parametrize("init, raw", [("gloo", "1"), ("shm", "1"), ("gloo", "0")])
@on_ranks(2, given=["init"])
def test_calls_of_torch_distributed(rank, world, init, raw):
    """Every collective of torch.distributed that the backend has; all at once by the log, none of them twice."""
    with unittest.mock.patch.dict(os.environ, DS_COMMS_LOGGER_RAW=raw):
        fresh()
    raw_dist, x = torch.distributed, torch.ones(8)
    parts, wide = [torch.ones(8) for _ in range(world)], torch.empty(8 * world)
    raw_dist.all_reduce(x)
    raw_dist.all_reduce(x, async_op=True).wait()
    raw_dist.broadcast(x, 0)
    raw_dist.reduce(x, 0)
    raw_dist.all_gather(parts, x)
    raw_dist.gather(x, parts if rank == 0 else None, 0)
    raw_dist.scatter(x, parts if rank == 0 else None, 0)
    raw_dist.all_to_all_single(torch.empty(8), x)
    raw_dist.barrier()
    if init == "shm":
        raw_dist.reduce_scatter(x, parts)
        raw_dist.all_to_all([torch.empty(8) for _ in range(world)], parts)
        raw_dist.all_gather_into_tensor(wide, x)
        raw_dist.reduce_scatter_tensor(x, wide)
    found = counts()
    for sizes in comms_log.comms_logger.get_raw_data().values():
        assert all(ms > 0 for _, times, *_ in sizes.values() for ms in times)
    off()
    expected = {
        "all_reduce": {32: 2},
        "broadcast": {32: 1},
        "reduce": {32: 1},
        "all_gather": {32: 1},
        "gather": {32: 1},
        "scatter": {32: 1},
        "all_to_all_single": {32: 1},
        "barrier": {0: 1},
    }
    if init == "shm":
        expected |= {"reduce_scatter": {64: 1}, "all_to_all": {64: 1}}
        if TORCH2:
            expected |= {"all_gather_into_tensor": {32: 1}, "reduce_scatter_tensor": {64: 1}}
        else:  # which has no operators for them: the native communicator behind the backend logs them
            del expected["all_to_all_single"]
            expected |= {"all_gather": {32: 2}, "reduce_scatter": {64: 2}, "all_to_all": {32: 1, 64: 1}}
    assert found == (expected if raw == "1" else {})


@on_ranks(3, init=True)
def test_a_late_rank_shows_in_the_others_times(rank, world, folder):
    path = os.path.join(folder, "log.json")
    fresh()
    x = torch.ones(1000)
    for _ in range(5):
        dist.barrier()
        if rank == 1:
            time.sleep(0.05)
        dist.all_reduce(x)
    row = dist.log_summary(show_straggler=True, return_dict=True)["straggler_analysis"]["all_reduce"][4000]
    assert (row["count"], row["ranks_compared"]) == (5, world)
    written = dist.write_summary(path, show_straggler=True)
    assert written["metadata"]["rank"] == rank and "all_gather_object" not in written["summary"]
    dist.barrier()
    summary = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["summary"]
    assert summary["all_reduce"]["4000"]["count"] == 5
    off()
    waits = together(row["total_straggler_ms"], row["avg_straggler_ms"])
    assert waits[0][0] > 200 and waits[2][0] > 200 and waits[0][1] > 40
    assert waits[1][0] < 50


@on_ranks(2, init=True)
def test_a_line_for_each_operation_on_rank_0(rank, world):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        fresh(verbose=True)
        dist.all_reduce(torch.ones(256))
        dist.log_summary()
        off()
    first, second = together(text.getvalue())
    line = next(line for line in first.splitlines() if "comm op" in line)
    assert "rank=0 | comm op: all_reduce | time (ms): " in line and "| msg size: 1 KB | algbw (Gbps): " in line
    assert "busbw (Gbps): " in line and "tput_avg (Gbps)" in first
    assert "comm op" not in second and "tput_avg" not in second


@pytest.mark.parametrize("stage, names", [(0, ["all_reduce"]), (2, ["all_gather", "all_reduce", "reduce_scatter"])])
@on_ranks(2)
def test_what_the_engine_sends_is_in_the_log(rank, world, stage, names):
    off()
    settings = {"stage": stage, "reduce_bucket_size": 10**6, "stage3_param_persistence_threshold": 10**6}
    made = config(world, 1, zero_optimization=settings, comms_logger={"enabled": True})
    engine = engine_of(make_net(), made)
    dist.reset_log()
    engine.core.reset_traffic()
    train_engine(engine, 2, rank, world)
    traffic = engine.core.traffic()
    found = counts()
    sent = 0
    for name, sizes in found.items():
        times = {"all_reduce": 2 * (world - 1) / world, "reduce_scatter": (world - 1) / world, "all_gather": world - 1}
        sent += sum(int(size * times.get(name, 1)) * count for size, count in sizes.items())
    calls = sum(count for sizes in found.values() for count in sizes.values())
    assert calls == traffic["calls"] and abs(sent - traffic["bytes"]) <= calls * 8, (found, traffic)
    row = dist.log_summary(return_dict=True)["summary"]
    assert all(figures["total_latency_ms"] > 0 for sizes in row.values() for figures in sizes.values())
    weights = [p.detach().clone() for p in engine.module.parameters()]
    engine.destroy()
    del engine
    off()
    engine = after_steps(engine_of(make_net(), config(world, 1, zero_optimization=settings)), 2, rank, world)
    assert not dist.has_comm_data()
    # Waiting for each operation changes no bit.
    assert all(torch.equal(a, b) for a, b in zip(weights, engine.module.parameters(), strict=True))
    assert sorted(found) == names


@on_ranks(2)
def test_stage_3_too(rank, world):
    made = config(world, 1, zero_optimization={"stage": 3}, comms_logger={"enabled": True})
    train_engine(engine_of(make_net(), made), 2, rank, world)
    found = dist.get_logged_comm_ops()
    off()
    assert "reduce_scatter" in found


@on_ranks(2, init=True)
def test_a_monitored_barrier_names_who_is_missing(rank, world):
    if rank == 0:
        refused(RuntimeError, "[Rr]ank 1", dist.monitored_barrier, timeout=datetime.timedelta(seconds=1))
    else:
        time.sleep(2)


@on_ranks(2, init=True)
def test_gathers_before_there_is_an_engine(rank, world):
    fresh()
    with deepspeed.zero.Init(dtype=torch.float32):
        model = torch.nn.Linear(8, 8)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        pass
    found = dist.get_logged_comm_ops()
    off()
    assert any("all_gather" in name for name in found)

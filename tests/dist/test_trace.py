"""Traces of several ranks: what is in the file, whose clocks they have, and that nothing stays behind."""

import collections
import gc
import json
import os
import time
from unittest import mock

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm import comms_log, mesh_views
from deepspeed.comm.timed import call_log
from deepspeed.engine.parts import tracing
from deepspeed.profiling.clocks import aligned
from deepspeed.profiling.trace import events_of
from engine_models import net_engine, train_engine
from harness import on_ranks
from runs import raised, together


def read(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def slices(found, track):
    """The rows of a track: ``{rank: [event]}``."""
    named = {(one["pid"], one["tid"]) for one in found if one["ph"] == "M" and one["args"]["name"] == track}
    rows = collections.defaultdict(list)
    for one in found:
        if one["ph"] == "X" and (one["pid"], one["tid"]) in named:
            rows[one["pid"]].append(one)
    return rows


def check_flows(found, world):
    """Every collective of all ranks has one flow, which begins, passes and ends inside of a row of each rank."""
    calls = slices(found, "communication")
    assert sorted(calls) == list(range(world))
    keys = [sorted((one["args"]["group"], one["args"]["number"]) for one in calls[rank]) for rank in range(world)]
    assert keys[0] and all(one == keys[0] for one in keys) and len(set(keys[0])) == len(keys[0])
    flows = collections.defaultdict(list)
    for one in found:
        if one["ph"] in "stf":
            flows[one["id"]].append(one)
    assert len(flows) == len(keys[0])
    for ends in flows.values():
        assert [one["ph"] for one in ends] == ["s", *"t" * (world - 2), "f"]
        assert sorted(one["pid"] for one in ends) == list(range(world))
        rows = [
            next(row for row in calls[one["pid"]] if (row["tid"], row["ts"]) == (one["tid"], one["ts"])) for one in ends
        ]
        assert len({(row["name"], row["args"]["group"], row["args"]["number"]) for row in rows}) == 1
        assert [one["ts"] for one in ends] == sorted(one["ts"] for one in ends)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4, init=True)
def test_four_ranks(rank, world, folder, stage):
    path = os.path.join(folder, "made", "trace.json")
    zero = {"stage3_param_persistence_threshold": 0}
    engine = net_engine(world, stage, zero=zero, trace={"start_step": 2, "steps": 2, "path": path})
    train_engine(engine, 1, rank, world)
    assert call_log.records
    train_engine(engine, 2, rank, world)
    assert not call_log.records
    train_engine(engine, 1, rank, world)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in engine.module.modules()]
    engine.trace(1, path + ".2")
    train_engine(engine, 1, rank, world)
    after = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in engine.module.modules()]
    assert hooks == after
    engine.destroy()
    dist.barrier()
    if rank == 0:
        found = read(path)["traceEvents"]
        check_flows(found, world)
        phases, modules = slices(found, "phases"), slices(found, "modules")
        for each in range(world):
            assert [one["name"] for one in phases[each]] == ["forward", "backward", "optimizer"] * 2
            assert {"embed", "first", "norm", "out"} <= {one["name"] for one in modules[each]}
            inside = phases[each][0]
            first = modules[each][0]
            assert inside["ts"] <= first["ts"] and first["ts"] + first["dur"] <= inside["ts"] + inside["dur"]
        reductions = [one for one in slices(found, "communication")[0] if one["name"] == "reduce_scatter"]
        assert reductions and all(one["args"]["bytes"] > 0 and one["args"]["tag"] for one in reductions)
        assert {one["args"]["purpose"] for one in reductions} == {"reduce"}
        assert all(0 <= one["args"]["blocked_ms"] * 1e3 <= one["dur"] + 1 for one in reductions)
        check_flows(read(path + ".2")["traceEvents"], world)


@on_ranks(2, init=True)
def test_scripts_calls_offload_and_the_profiler_of_torch(rank, world, folder):
    path = os.path.join(folder, "trace.json")
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    engine = net_engine(world, 2, zero=nvme)
    engine.trace(1, path)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.ones(3))
        torch.distributed.all_reduce(torch.ones(5))
        train_engine(engine, 1, rank, world)
    names = {event.name for event in profiler.events()}
    assert {"forward", "backward", "optimizer", "embed"} <= names
    engine.destroy()
    dist.barrier()
    if rank == 0:
        found = read(path)["traceEvents"]
        check_flows(found, world)
        for each in range(world):
            calls = [(one["name"], one["args"]["bytes"]) for one in slices(found, "communication")[each]]
            assert ("all_reduce", 12) in calls and ("all_reduce", 20) in calls
            assert {"read file", "write file"} <= {one["name"] for one in slices(found, "offload")[each]}
            assert any("embedding" in one["name"] for one in slices(found, "torch")[each])


@on_ranks(4, init=True)
def test_clocks_of_hosts_that_are_apart(rank, world):
    """Two ranks each pretend to be on a host; the clocks of the hosts are 3 s apart."""
    everyone, shift, tries = mesh_views.adopted_by_all(), 3.0 * (rank // 2), []
    for _ in range(5):  # a busy machine may spoil a try
        offset, error = aligned(everyone, f"host {rank // 2}", lambda: time.perf_counter() + shift)
        tries.append((error, abs(offset - shift)))
        if max(together(error)) < 2e-4:
            break
    error, off = min(tries)
    assert off <= error < 2e-4 and (rank >= 2 or error == 0)


def test_calls_of_ranks_with_shifted_clocks_meet():
    def rank(number, shift):
        values = {"bytes": 4, "group": "mesh/reduce/0,1/0", "number": 7, "tag": "", "purpose": "reduce"}
        rows = [["communication", "all_reduce", 10.0 + shift, 10.5 + shift, values]]
        return {"host": f"h{number}", "offset": shift, "error": 1e-5, "rows": rows}

    found = events_of([rank(0, 0.0), rank(1, 3.0)])
    assert [one["ts"] for one in found if one["ph"] == "X"] == [0.0, 0.0]
    assert [one["ph"] for one in found if one["ph"] in "sf"] == ["s", "f"]


@on_ranks(2, init=True)
def test_bad_input(rank, world, folder):
    path = os.path.join(folder, "file")
    with open(path, "w", encoding="utf-8"):
        pass
    below = os.path.join(path, "trace.json")
    kind, text = raised(net_engine, world, trace={"start_step": 1, "path": below})
    assert kind == "ValueError" and text.startswith("rank 0: trace.path: ")
    engine = net_engine(world, 1, trace={"start_step": 5, "path": path})
    assert raised(engine.trace, 1, below)[1].startswith("rank 0: engine.trace: path: ")
    assert "steps is a whole number" in raised(engine.trace, 0)[1]
    engine.trace(3, path)
    assert "still to be recorded" in raised(engine.trace, 1, path)[1]
    train_engine(engine, 2, rank, world)
    with mock.patch.object(tracing.logger, "warning") as warning:
        engine.destroy()  # writes the two steps
    told = [call.args[0] for call in warning.call_args_list]
    assert told == ["trace.start_step is 5, and the training has ended before that step: there is no trace"] * (
        rank == 0
    )
    if rank == 0:
        assert len(slices(read(path)["traceEvents"], "phases")[0]) == 6


@on_ranks(2, init=True)
def test_the_comms_logger_beside_a_trace(rank, world, folder):
    """In any order; the step log is on all the time."""
    engine = net_engine(world, 2)
    for logger_first in (True, False):
        path = os.path.join(folder, str(logger_first))

        def switch(on):
            dist.configure(enabled=on, prof_all=True, prof_ops=[])

        if logger_first:
            switch(True)
        engine.trace(2, path)
        switch(True)
        dist.reset_log()
        assert call_log.waits
        torch.distributed.all_reduce(torch.ones(8))
        train_engine(engine, 1, rank, world)
        logged = dist.get_comm_operation_count()
        assert (
            "all_reduce" in dist.get_logged_comm_ops() and comms_log.comms_logger.comms_dict["all_reduce"][32][0] >= 1
        )
        if not logger_first:
            switch(False)
            assert call_log.records and not call_log.waits
        train_engine(engine, 1, rank, world)
        if logger_first:
            assert dist.get_comm_operation_count() > logged
            switch(False)
        assert call_log.on and not call_log.records
        dist.reset_log()
        dist.barrier()
        if rank == 0:
            check_flows(read(path)["traceEvents"], world)
    engine.destroy()
    gc.collect()
    assert not call_log.on

"""Ranks whose calls of ``deepspeed.comm`` do not mean the same: all of them fail within seconds, on every verb, over
gloo, through the memory beside it, and over the backend shm. Ranks as threads: tests/cpp/comm/mismatch_test.cpp."""

import functools
import os
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed

import deepspeed
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.read import node_local
from harness import on_ranks
from refusals import refused
from runs import together

LIMIT_S, WRONG = 5.0, 1
# verb -> the arguments of its call: tensors of one rank, of all ranks together and of each rank
VERBS = {
    "all_reduce": lambda t: (t.one,),
    "reduce": lambda t: (t.one, 0),
    "broadcast": lambda t: (t.one, 0),
    "reduce_scatter": lambda t: (t.one, t.parts),
    "reduce_scatter_tensor": lambda t: (t.one, t.whole),
    "all_gather": lambda t: (t.parts, t.one),
    "all_gather_into_tensor": lambda t: (t.whole, t.one),
    "all_to_all": lambda t: (t.parts, t.other_parts),
    "all_to_all_single": lambda t: (t.whole, t.other_whole),
    "gather": lambda t: (t.one, t.parts if t.rank == 0 else None, 0),
    "scatter": lambda t: (t.one, t.parts if t.rank == 0 else None, 0),
    "all_reduce_coalesced": lambda t: ([t.one, t.other],),
    "all_gather_coalesced": lambda t: ([t.whole, t.other_whole], [t.one, t.other]),
}
FAULTS = ("shape", "dtype", "splits")
# Comparing through the store takes a second or two for each error: one fault for each verb.
OVER_GLOO = [(verb, FAULTS[i % 2]) for i, verb in enumerate(VERBS)] + [("all_to_all_single", "splits")]
IN_MEMORY = [(verb, fault) for verb in VERBS for fault in FAULTS[:2]] + [("all_to_all_single", "splits")]


@pytest.fixture
def traces(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_COMM_TRACE_DIR", str(tmp_path))


def ones_of_backend():
    """``torch.ones`` on the device of the test, or for the backend shm in memory of the host."""
    here = "cpu" if comm.get_backend() == "shm" else get_accelerator().current_device_name()
    return functools.partial(torch.ones, device=here)


def call(verb, fault, rank, world, group):
    wrong = rank == WRONG
    count = 8 if wrong and fault == "shape" else 6
    dtype = torch.float64 if wrong and fault == "dtype" else torch.float32
    ones = ones_of_backend()
    if fault == "splits":
        given = [(rank + other) % world + 1 for other in range(world)]
        taken = given[::-1] if wrong else given  # as many in all
        return comm.all_to_all_single(ones(sum(taken)), ones(sum(given)), taken, given, group=group)
    one, whole = ones(count, dtype=dtype), ones(count * world, dtype=dtype)
    tensors = SimpleNamespace(
        rank=rank, one=one, other=one.clone(), whole=whole, other_whole=whole.clone(),
        parts=[one.clone() for _ in range(world)], other_parts=[one.clone() for _ in range(world)],
    )  # fmt: skip
    return getattr(comm, verb)(*VERBS[verb](tensors), group=group)


@pytest.mark.parametrize(
    "backend, cases, env",
    [
        ("shm", IN_MEMORY, {}),
        ("gloo", IN_MEMORY, {}),
        pytest.param(
            "gloo",
            OVER_GLOO,
            {"DS_SHM_COLLECTIVES": "0", "DS_COMM_FINGERPRINTS": "strict"},
            marks=pytest.mark.any_device,
        ),
    ],
    ids=["shm", "memory", "gloo"],
)
@pytest.mark.usefixtures("traces")
@on_ranks(3, timeout=120, given=["env"])
def test_every_rank_fails_within_seconds(rank, world, backend, cases):
    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=60), verbose=False)
    ones_of_backend()(1)  # the first tensor on a GPU takes seconds
    for verb, fault in cases:
        group = comm.new_group(list(range(world)))
        began = time.monotonic()
        error = refused(RuntimeError, None, call, verb, fault, rank, world, group)
        seconds, text = time.monotonic() - began, str(error).splitlines()[0]
        assert "call different collectives" in text or "gives another one more or less" in text, (verb, fault, text)
        assert seconds < LIMIT_S, (verb, fault, seconds)
        assert fault != "splits" or "(split sizes)" in text
        time.sleep(0.1)  # the others want to know where this rank is
    comm.barrier()  # the group of all is whole


@pytest.mark.parametrize(
    "backend, env, text",
    [
        ("shm", {}, "has not come for 2 s"),
        ("gloo", {}, "has not come for 2 s"),
        pytest.param(
            "gloo",
            {"DS_SHM_COLLECTIVES": "0"},
            "has not entered any collective of this group",
            marks=pytest.mark.any_device,
        ),
    ],
    ids=["shm", "memory", "gloo"],
)
@pytest.mark.usefixtures("traces")
@on_ranks(3, timeout=60, given=["env"])
def test_ranks_in_other_groups_are_told_after_the_timeout(rank, world, backend, text):
    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=60), verbose=False)
    os.environ["DS_COMM_TIMEOUT_S"] = "2"
    if backend == "shm":
        one, two = (torch.distributed.new_group(timeout=timedelta(seconds=2)) for _ in range(2))
    else:
        one, two = (comm.new_group(list(range(world))) for _ in range(2))
    began = time.monotonic()
    error = refused(RuntimeError, None, comm.all_reduce, ones_of_backend()(3), group=two if rank == WRONG else one)
    seconds = time.monotonic() - began
    del os.environ["DS_COMM_TIMEOUT_S"]
    comm.barrier()  # a rank that left now would destroy groups in which another one waits, and that one would name it
    assert text in str(error) and seconds < LIMIT_S + 2


# ---- what one rank sees by itself: nothing is sent, and the group goes on --------------------------------------------
def fail_as_rank_0_does():
    raise TypeError("dtype")


@pytest.mark.parametrize(
    "backend, env",
    [
        ("shm", {}),
        pytest.param("gloo", {}, marks=pytest.mark.any_device),
        pytest.param("gloo", {"DS_SHM_COLLECTIVES": "0"}, marks=pytest.mark.any_device),
    ],
)
@on_ranks(2, timeout=60, given=["env"])
def test_dtypes_that_differ_on_one_rank_are_refused(rank, world, backend):
    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=60), verbose=False)
    ones = ones_of_backend()
    one, narrow = ones(4), ones(4, dtype=torch.bfloat16)
    whole, narrow_whole = ones(4 * world), ones(4 * world, dtype=torch.bfloat16)
    for call in (
        lambda: comm.all_gather_into_tensor(narrow_whole, one),
        lambda: comm.all_gather_into_tensor(whole, narrow),
        lambda: comm.all_gather([narrow] * world, one),
        lambda: comm.reduce_scatter_tensor(narrow, whole),
        lambda: comm.reduce_scatter_tensor(one, narrow_whole),
        lambda: comm.reduce_scatter(one, [narrow] * world),
        lambda: comm.all_to_all_single(narrow_whole, whole),
        lambda: comm.all_to_all([one] * world, [narrow] * world),
        lambda: comm.gather(narrow, [one] * world if rank == 0 else None, 0) if rank == 0 else fail_as_rank_0_does(),
        lambda: comm.scatter(one, [narrow] * world, 0) if rank == 0 else fail_as_rank_0_does(),
    ):
        # torch itself checks lists: 1.13 raises RuntimeError, 2.x raises ValueError.
        refused((TypeError, RuntimeError, ValueError), "dtype", call)
    comm.all_reduce(one)
    assert one.tolist() == [2.0] * 4


# ---- several calls as one, of the backend shm ------------------------------------------------------------------------
@pytest.mark.usefixtures("traces")
@on_ranks(2, timeout=60)
def test_coalesced_calls_give_a_handle_and_the_first_error(rank, world):
    deepspeed.init_distributed(dist_backend="shm", timeout=timedelta(seconds=60), verbose=False)
    group = torch.distributed.group.WORLD
    backend = group._get_backend(torch.device("cpu")) if hasattr(group, "_get_backend") else group
    made = [torch.zeros(world), torch.zeros(2 * world)]
    if hasattr(backend, "allgather_into_tensor_coalesced"):
        for call in (backend.allgather_into_tensor_coalesced, backend.reduce_scatter_tensor_coalesced):
            work = call([], [])
            assert work is not None and work.wait()
        backend.allgather_into_tensor_coalesced(made, [torch.full((1,), rank + 1.0), torch.ones(2)]).wait()
        # The first of two fails: the ranks do not give as many elements.
        bad = 3 if rank == WRONG else 2
        work = backend.allgather_into_tensor_coalesced(
            [torch.zeros(bad * world), torch.zeros(world)], [torch.ones(bad), torch.ones(1)]
        )
        refused(RuntimeError, "call different collectives", work.wait)


# ---- files that ranks send each other --------------------------------------------------------------------------------
@on_ranks(2, init=True, timeout=60)
def test_a_file_that_its_owner_cannot_read_leaves_nobody_waiting(rank, world, tmp_path):
    ranks = SimpleNamespace(rank=rank, world=world, gather=together)
    error = node_local._send(ranks, str(tmp_path / str(rank) / "gone"), 0, [1], torch.device("cpu"))
    assert type(error).__name__ == ("NoneType" if rank else "FileNotFoundError")
    assert not list(tmp_path.rglob("gone*"))


@on_ranks(2, init=True, env={"DS_COMM_TIMEOUT_S": "3"})
def test_a_rank_in_a_call_of_another_group_is_not_called_idle(rank, world):
    if rank:
        os.environ["DS_COMM_TIMEOUT_S"] = "40"  # it is still there when rank 0 asks
    other = comm.new_group([0, 1])
    comm.barrier(group=other)
    comm.barrier()
    error = refused(RuntimeError, None, comm.all_reduce, torch.ones(5 + rank), group=other if rank else None)
    if rank == 0:
        text = str(error)
        assert "all_reduce(6 x float32, sum)" in text and "all_reduce(5 x float32, sum)" in text and "in group" in text

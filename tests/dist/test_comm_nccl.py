"""The ranks of an ``NcclCommunicator`` come together through a torch group, or are told why they cannot."""

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from deepspeed import _native
from deepspeed._compat import group_around
from deepspeed.comm import mesh, nccl_join
from deepspeed.comm.nccl import NcclCommunicator
from fake_nccl import Orders, build
from harness import on_ranks
from refusals import refused
from runs import together


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nccl")
    build(folder)
    build(folder, "libfake_old.so", "FAKE_NCCL_OLD")
    return folder


@on_ranks(2, init=True, fresh=True)
def test_one_communicator_for_each_group(rank, world, folder):
    path = str(folder / "libfake_nccl.so")
    groups = [dist.new_group([r]) for r in range(world)]
    comm = NcclCommunicator(groups[rank], device="cpu", library=path)
    assert (comm.rank, comm.size, comm.name) == (0, 1, "a group of 1")
    x = torch.full((3,), float(rank))
    comm.all_reduce(x)
    assert x.tolist() == [rank] * 3
    refused(ValueError, "not a member of the group", NcclCommunicator, groups[1 - rank], device="cpu", library=path)
    comm.close()
    assert Orders(path).count("destroyed") == 1


@on_ranks(2, init=True)
def test_all_ranks_name_the_one_that_has_no_nccl(rank, world, folder):
    error = refused(
        RuntimeError,
        None,
        NcclCommunicator,
        device="cpu",
        library=str(folder / "libfake_nccl.so") if rank == 0 else "/nowhere/libnccl.so.2",
    )
    first, second = together(str(error))
    assert first == second and "rank 1: RuntimeError: NCCL cannot be opened from /nowhere/libnccl.so.2" in first
    assert "'all ranks' cannot be made" in first and "rank 0:" not in first


@on_ranks(2, init=True)
def test_all_ranks_name_versions_that_differ(rank, world, folder):
    library = f"{folder}/libfake_{['nccl', 'old'][rank]}.so"
    first, second = together(str(refused(RuntimeError, None, NcclCommunicator, device="cpu", library=library)))
    assert first == second and "rank 0: 2.28.9 (" in first and "rank 1: 2.18.3 (" in first


@on_ranks(2, init=True)
def test_ranks_are_processes(rank, world, folder):
    comm = NcclCommunicator(device="cpu", library=str(folder / "libfake_nccl.so"))
    x, all_ranks = torch.full((3,), rank + 1.0), torch.empty(2)
    comm.all_reduce(x)
    comm.all_gather(all_ranks, torch.tensor([float(rank)]))
    comm.close()
    assert (x.tolist(), all_ranks.tolist()) == ([3.0] * 3, [0.0, 1.0])


@on_ranks(2, init=True, fresh=True)
def test_a_rank_that_does_not_come_ends_the_timeout(rank, world, folder):
    path = str(folder / "libfake_nccl.so")
    if rank == 1:
        Orders(path).fail("ncclCommInitRankConfig", 2)
    error = refused(RuntimeError, None, NcclCommunicator, device="cpu", library=path, name="halves", timeout=0.2)
    why = ["it has not come about within 0.2 s", "unhandled system error"][rank]
    assert f'"halves", rank {rank} of 2: joining failed: {why}' in str(error)


@on_ranks(1, init=True, env={"DS_ACCELERATOR": "cpu"}, fresh=True)
def test_without_a_gpu_it_says_so(rank, world):
    refused(ValueError, "a library but no device", NcclCommunicator, library="x")
    refused(RuntimeError, "(?s)NCCL moves memory of CUDA devices.*Use torch.distributed", NcclCommunicator)


@on_ranks(1)
def test_a_process_group_comes_first(rank, world):
    refused(RuntimeError, "call deepspeed.init_distributed", NcclCommunicator, device="cpu", library="x")


# ---- as an engine's transport ----------------------------------------------------------------------------------------
@on_ranks(2, init=True, fresh=True)
def test_engines_of_nccl_jobs_call_it_directly(rank, world, folder):
    path = str(folder / "libfake_nccl.so")
    os.environ.update(DS_COMM_TIMEOUT_S="1")
    nccl_join.device_of = lambda device, library: torch.device("cpu")  # where the stand-in has its memory
    stand_in = nccl_join.find_library(path)  # named: torch 2.x has loaded its own, which DS_NCCL_LIBRARY cannot replace
    nccl_join.find_library = lambda path=None: stand_in
    alone = mesh._open("nccl", f"mesh/reduce/{rank}/0", [rank])
    x = torch.full((3,), float(rank))
    alone.run("all_reduce", None, x).wait()
    assert (alone.name, alone.size) == ("nccl", 1) and x.tolist() == [rank] * 3
    alone.leave()
    assert Orders(path).count("created") == 1 and Orders(path).count("alive") == 0
    both = mesh._open("nccl", "mesh/reduce/0,1/0", [0, 1])
    both.run("all_reduce", None, x).wait()
    assert x.tolist() == [1.0] * 3
    both.run("barrier").wait()
    both.leave()


def _threads(size, body):
    """``body(rank, store)`` on threads; their results."""
    store, results = dist.HashStore(), [None] * size

    def run(rank):
        try:
            results[rank] = body(rank, store)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_communicator_of_several_ranks_that_met_in_a_store(folder):
    wait = timedelta(seconds=30)

    def body(rank, store):
        native = nccl_join.join_by_store(
            dist.PrefixStore("nccl", store), "m", rank, 2, wait, "cpu", str(folder / "libfake_nccl.so")
        )
        host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, 2, wait)
        comm = _native._C.Communicator(group_around(host, "gloo", store, rank, 2), nccl=native)
        x, all_ranks = torch.full((3,), rank + 1.0), torch.empty(2)
        comm.run("all_reduce", None, x).wait()  # host memory goes over the group
        native.all_gather(all_ranks, torch.tensor([float(rank)]))
        comm.run("barrier").wait()
        comm.leave()
        return comm.name, x.tolist(), all_ranks.tolist()

    assert _threads(2, body) == [("nccl", [3.0] * 3, [0.0, 1.0])] * 2


def test_where_one_rank_has_no_nccl_all_go_through_torch(folder):
    def body(rank, store):
        path = str(folder / "libfake_nccl.so") if rank == 0 else "/nowhere/libnccl.so.2"
        return nccl_join.join_by_store(store, "m", rank, 2, timedelta(seconds=30), "cpu", path)

    assert _threads(2, body) == [None, None]

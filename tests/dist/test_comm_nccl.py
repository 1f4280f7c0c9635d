"""How the ranks of an ``NcclCommunicator`` come together through a torch group, and how they do not.

The library that stands in for NCCL joins ranks of one process only, so communicators here have one rank, or fail.
"""

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.nccl import NcclCommunicator
from fake_nccl import Orders, build
from harness import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nccl")
    build(folder)
    build(folder, "libfake_old.so", "FAKE_NCCL_OLD")
    return folder


def _own_group(rank, world, path):
    groups = [dist.new_group([r]) for r in range(world)]
    comm = NcclCommunicator(groups[rank], device="cpu", library=path)
    assert (comm.rank, comm.size, comm.name) == (0, 1, "a group of 1")
    x = torch.full((3,), float(rank))
    comm.all_reduce(x)
    assert x.tolist() == [rank] * 3
    with pytest.raises(ValueError, match="no member of the group"):
        NcclCommunicator(groups[1 - rank], device="cpu", library=path)
    comm.close()
    assert Orders(path).count("destroyed") == 1
    return True


def test_one_communicator_for_each_group(folder):
    assert run_ranks(2, _own_group, str(folder / "libfake_nccl.so"), init=True, fresh=True) == [True] * 2


def _one_lacks_it(rank, world, path):
    with pytest.raises(RuntimeError) as error:
        NcclCommunicator(device="cpu", library=path if rank == 0 else "/nowhere/libnccl.so.2")
    return str(error.value)


def test_all_ranks_name_the_one_that_has_no_nccl(folder):
    first, second = run_ranks(2, _one_lacks_it, str(folder / "libfake_nccl.so"), init=True)
    assert first == second and "rank 1: RuntimeError: NCCL cannot be opened from /nowhere/libnccl.so.2" in first
    assert "'all ranks' cannot be made" in first and "rank 0:" not in first


def _versions_differ(rank, world, folder):
    with pytest.raises(RuntimeError) as error:
        NcclCommunicator(device="cpu", library=f"{folder}/libfake_{['nccl', 'old'][rank]}.so")
    return str(error.value)


def test_all_ranks_name_versions_that_differ(folder):
    first, second = run_ranks(2, _versions_differ, str(folder), init=True)
    assert first == second and "rank 0: 2.28.9 (" in first and "rank 1: 2.18.3 (" in first


def _the_other_does_not_come(rank, world, path):
    with pytest.raises(RuntimeError) as error:
        NcclCommunicator(device="cpu", library=path, name="halves", timeout=0.2)
    return str(error.value)


def test_a_rank_that_does_not_come_ends_the_timeout(folder):
    """Two processes do not meet in this library: to each the other one never comes."""
    for rank, text in enumerate(run_ranks(2, _the_other_does_not_come, str(folder / "libfake_nccl.so"), init=True)):
        assert f'"halves", rank {rank} of 2: joining failed: it has not come about within 0.2 s' in text


def _without_a_gpu(rank, world):
    with pytest.raises(ValueError, match="a library but no device"):
        NcclCommunicator(library="x")
    with pytest.raises(RuntimeError) as error:
        NcclCommunicator()
    return str(error.value)


def test_without_a_gpu_it_says_so():
    (text,) = run_ranks(1, _without_a_gpu, init=True, env={"DS_ACCELERATOR": "cpu"}, fresh=True)
    assert "NCCL moves memory of CUDA devices" in text and "Use torch.distributed" in text


def _before_joining(rank, world):
    with pytest.raises(RuntimeError, match="call deepspeed.init_distributed"):
        NcclCommunicator(device="cpu", library="x")


def test_a_process_group_comes_first():
    run_ranks(1, _before_joining)

"""NCCL itself, called directly: one rank on one GPU, or on the stand-in device the library that stands in for NCCL.
What several ranks do is tests/python/comm/test_nccl.py, over that library."""

import time

import pytest
import torch

import deepspeed
import devices
import fake_nccl
from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import ReduceOp
from deepspeed.comm.nccl import NcclCommunicator, find_library, timedelta
from harness import on_ranks, run_ranks
from refusals import refused

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(devices.NAME == "cpu", reason="NCCL moves no memory of the CPU")]
DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64"]
MOVED = [*DTYPES, "bool", "float8_e4m3fn", "float8_e5m2"]


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    """On the stand-in device its library with NCCL's interface."""
    with fake_nccl.on_the_standin(tmp_path_factory):
        yield


def communicator():
    deepspeed.init_distributed()
    return NcclCommunicator()


def values(numel, dtype):
    return (torch.arange(numel, device=get_accelerator().current_device_name()) % 5 + 1).to(dtype)


def same(one, other):
    return one.view(torch.uint8).equal(other.view(torch.uint8))  # fp8 has no equal()


@pytest.mark.parametrize("name", DTYPES)
@on_ranks(1)
def test_reductions(rank, world, name):
    comm = communicator()
    dtype = getattr(torch, name)
    for numel in (0, 1, 7, 1003, 100003, 1000003):
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG):
            x, want = values(numel, dtype), values(numel, dtype)
            out = torch.zeros_like(x)
            comm.all_reduce(x, op, out)
            assert out.equal(want)
            comm.all_reduce(x, op)
            comm.reduce(x, 0, op)
            assert x.equal(want)
            out.zero_()
            comm.reduce_scatter(out, x, op)
            assert out.equal(want)
    comm.wait(30)
    comm.close()


def _moves(rank, world, name):
    comm = communicator()
    dtype = getattr(torch, name)
    for numel in (0, 1, 7, 100003):
        x = values(numel, dtype)
        outputs = [torch.zeros(numel, device=x.device).to(dtype) for _ in range(3)]
        comm.all_gather(outputs[0], x)
        comm.all_to_all(outputs[1], x)
        comm.all_to_all(outputs[2], x, output_splits=[numel], input_splits=[numel])
        assert all(same(y, x) for y in outputs)
        y = torch.zeros(numel, device=x.device).to(dtype)
        with comm.group():
            comm.send(x, 0)
            comm.recv(y, 0)
        assert same(y, x)
        comm.broadcast(y, 0)
        assert same(y, x)
    comm.close()


@pytest.mark.parametrize("name", MOVED)
def test_moves(name):
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    run_ranks(1, _moves, name)


@on_ranks(1)
def test_user_buffers(rank, world):
    comm = communicator()
    free = get_accelerator().available_memory()
    for _ in range(20):  # one after the other, of a GPU 20 x 64 MiB
        x = comm.registered_empty(1 << (24 if devices.NAME == "cuda" else 18))
        x.fill_(2)
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            comm.all_reduce(x, op)
        assert x.min() == 2 == x.max()
        view = x[5:10]
        del x
        comm.broadcast(view, 0)
        assert view.tolist() == [2] * 5
        del view
    assert get_accelerator().available_memory() > free - (256 << 20)
    half = comm.registered_empty(33, torch.bfloat16)
    assert half.data_ptr() % 512 == 0
    half.copy_(values(33, torch.bfloat16))
    comm.all_gather(half, half)
    assert half.equal(values(33, torch.bfloat16))
    second = NcclCommunicator(name="second")
    with_second = second.register(half)
    second.all_reduce(half)
    with_second.release()
    second.close()
    comm.close()
    assert half.equal(values(33, torch.bfloat16))  # the memory is the tensor's
    del half


@on_ranks(1)
def test_streams(rank, world):
    """Work goes on the stream that is current, in order, and the host does not wait for it."""
    comm = communicator()
    accelerator = get_accelerator()
    comm.all_reduce(values(1, torch.float32))
    side = accelerator.Stream()
    x = torch.zeros(1 << (26 if devices.NAME == "cuda" else 20), device=accelerator.current_device_name())
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side):
        for _ in range(50):
            x.add_(1)
            comm.all_reduce(x)
        begun = time.monotonic()
        comm.wait(60)
        waited = time.monotonic() - begun
    assert x.min() == 50 == x.max()
    comm.close()
    assert waited > 0


def _errors(rank, world):
    comm = communicator()
    x = values(4, torch.float32)
    here = get_accelerator().current_device_name()
    refused(ValueError, f"is on cpu, but this communicator moves memory of {here}", comm.all_reduce, x.cpu())
    comm.abort("the test says so")
    refused(RuntimeError, "aborted: the test says so", comm.all_reduce, x)
    comm.close()
    library = find_library(get_accelerator()._nccl_library)
    begun = time.monotonic()
    refused(
        RuntimeError,
        "joining failed: it has not come about within 2 s",
        _native._C.NcclCommunicator,
        library,
        library.make_id(),
        "half",
        0,
        2,
        timedelta(seconds=2),
        lambda: None,
        here,
    )
    assert time.monotonic() - begun < 30
    again = NcclCommunicator()  # this process has not suffered
    again.all_reduce(x)
    assert x.equal(values(4, torch.float32))
    return again.library, again.version


def test_errors_leave_the_process_alive():
    ((library, version),) = run_ranks(1, _errors, fresh=True)
    assert "nccl.so" in library and version.startswith("2.")


@on_ranks(1)
def test_beside_torchs_own_group(rank, world):
    """The group of the job (torch's own on a GPU) and ours take turns."""
    comm = communicator()
    x = values(1000, torch.float32)
    for _ in range(10):
        dist.all_reduce(x)
        comm.all_reduce(x)
    assert x.equal(values(1000, torch.float32))

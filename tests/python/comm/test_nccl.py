"""NCCL called directly, over a library that stands in for it: ranks are threads, tensors lie on the host.

How the ranks find each other is tests/dist/test_comm_nccl.py, the real one tests/dist/test_comm_nccl_gpu.py.
"""

import functools
import gc
import inspect
import os
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepspeed import _native
from deepspeed.comm import ReduceOp, nccl, nccl_join
from deepspeed.comm.nccl import NcclCommunicator, find_library
from fake_nccl import Orders, build
from places import PYTHON
from processes import run_after_torch
from refusals import refused
from threads import started

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
]  # fmt: skip


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return build(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def fake(path):
    """Orders to the library; what a test leaves alive in it fails the test."""
    orders = Orders(path)
    orders.reset()
    yield orders
    gc.collect()
    assert orders.count("alive") == 0 and orders.count("memory") == 0 and orders.count("registrations lost") == 0
    orders.reset()


@pytest.fixture
def ranks(path, fake, monkeypatch):
    """A function: on ``size`` threads, each with its communicator, ``body(comm)``; their results by rank."""
    monkeypatch.setattr(
        nccl,
        "dist",
        types.SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            get_rank=lambda group: group.rank,
            get_world_size=lambda group: group.size,
        ),
    )
    monkeypatch.setattr(nccl, "introduce", lambda group, name, rank, found, problem: group.id)

    def run(size, body, timeout=20):
        id = find_library(path).make_id()

        def rank_body(rank):
            group = types.SimpleNamespace(rank=rank, size=size, id=id)
            comm = NcclCommunicator(group, device="cpu", name="test", timeout=timeout, library=path)
            result = body(comm)
            comm.close()
            return result

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(rank_body, range(size)))

    return run


def on_threads(size):
    """Makes the function below it a test that each of ``size`` threads runs. Its first parameter is the thread's
    communicator; pytest gives the others."""

    def decorate(body):
        _, *rest = inspect.signature(body).parameters.values()

        @functools.wraps(body)
        def test(ranks, **values):
            ranks(size, lambda comm: body(comm, **values))

        own = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([own, *rest])
        return test

    return decorate


def values(rank, numel, dtype):
    return ((torch.arange(numel) + 3 * rank) % 5 + 1).to(dtype)


def reduced(op, size, numel, dtype):
    stacked = torch.stack([values(rank, numel, torch.float64) for rank in range(size)])
    made = {
        ReduceOp.SUM: stacked.sum(0),
        ReduceOp.PRODUCT: stacked.prod(0),
        ReduceOp.MIN: stacked.amin(0),
        ReduceOp.MAX: stacked.amax(0),
        ReduceOp.AVG: stacked.mean(0),
    }[op]
    return made.to(dtype)


@pytest.mark.sample("values", 8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_collectives(ranks, size, dtype):
    def body(comm):
        rank = comm.rank
        for numel in (0, 1, 7, 129):
            for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG):
                want = reduced(op, size, numel, dtype)
                x = values(rank, numel, dtype)
                out = torch.empty_like(x)
                comm.all_reduce(x, op, out)
                torch.testing.assert_close(out, want)
                comm.reduce(x, size - 1, op)
                torch.testing.assert_close(x, want if rank == size - 1 else values(rank, numel, dtype))
                rows = values(rank, numel * size, dtype)
                comm.reduce_scatter(out, rows, op)
                want = reduced(op, size, numel * size, dtype)[rank * numel : (rank + 1) * numel]
                torch.testing.assert_close(out, want)
            x = values(rank, numel, dtype)
            rows = torch.empty(numel * size, dtype=dtype)
            comm.all_gather(rows, x)
            assert rows.equal(torch.cat([values(r, numel, dtype) for r in range(size)]))
            comm.broadcast(x, size - 1)
            assert x.equal(values(size - 1, numel, dtype))

    ranks(size, body)


@pytest.mark.skipif(not hasattr(torch, "float8_e5m2"), reason="this torch has no eight-bit floats")
@on_threads(2)
def test_eight_bit_floats_move(comm):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x = torch.full((3,), comm.rank + 1.0).to(dtype)
        rows = torch.zeros(6).to(dtype)
        comm.all_gather(rows, x)
        assert rows.float().tolist() == [1, 1, 1, 2, 2, 2]
        comm.broadcast(x, 1)
        assert x.float().tolist() == [2, 2, 2]


@on_threads(3)
def test_all_to_all_and_a_ring_of_sends(comm):
    rank, size = comm.rank, comm.size
    given = torch.arange(2 * size) + 100 * rank
    taken = torch.empty_like(given)
    comm.all_to_all(taken, given)
    assert taken.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]

    counts = [rank + r for r in range(size)]  # rank 0 keeps nothing for itself
    given = torch.full((sum(counts),), float(rank))
    taken = torch.full((sum(counts),), -1.0)
    comm.all_to_all(taken, given, output_splits=counts, input_splits=counts)
    assert taken.tolist() == [float(r) for r in range(size) for _ in range(rank + r)]

    x, y = torch.tensor([rank % 2 == 0, True]), torch.empty(2, dtype=torch.bool)
    with comm.group():
        comm.recv(y, (rank - 1) % size)
        comm.send(x, (rank + 1) % size)
    assert y.tolist() == [(rank - 1) % size % 2 == 0, True]


def test_codes_and_their_scale_travel_as_one_row_of_bytes(ranks, fake):
    """A compressed all-reduce, as a 1-bit optimizer does it: signs and one scale a chunk."""

    def pack(x):
        bits = (x >= 0).view(len(x), -1, 8).to(torch.uint8)
        bits = (bits << torch.arange(8, dtype=torch.uint8)).sum(2).to(torch.uint8)
        scales = x.abs().mean(1, keepdim=True)
        return torch.cat([scales.view(torch.uint8), bits], 1)

    def unpack(rows):
        bits = (rows[:, 4:].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1
        signs = bits.reshape(len(rows), -1).float() * 2 - 1
        return signs * rows[:, :4].contiguous().view(torch.float32)

    numel = 16  # of a chunk

    def gradients(rank, size):
        return torch.randn(size, numel, generator=torch.Generator().manual_seed(rank))

    def body(comm):
        size = comm.size
        mine = gradients(comm.rank, size)
        rows = pack(mine)
        got = torch.empty_like(rows)
        comm.all_to_all(got, rows)
        comm.all_gather(rows, pack(unpack(got).mean(0, keepdim=True)))
        return unpack(rows)

    size = 3
    found = ranks(size, body)
    everybody = torch.stack(
        [g.sign() * g.abs().mean(1, keepdim=True) for g in (gradients(r, size) for r in range(size))]
    )
    mean = everybody.mean(0)
    want = torch.where(mean >= 0, 1.0, -1.0) * mean.abs().mean(1, keepdim=True)
    for result in found:
        torch.testing.assert_close(result, want)


@on_threads(1)
def test_a_group_is_one_launch_and_an_error_in_it_sends_nothing(comm, fake):
    x, y = torch.ones(2), torch.ones(3)
    with comm.group():
        comm.all_reduce(x)
        with comm.group():
            comm.all_reduce(y)
        assert fake.count("ncclAllReduce") == 0
    assert (fake.count("groups"), fake.count("ncclAllReduce")) == (1, 2)
    with pytest.raises(KeyError), comm.group():
        comm.all_reduce(x)
        raise KeyError("x")
    comm.all_reduce(y)  # nothing has broken
    assert (fake.count("groups"), fake.count("ncclAllReduce")) == (1, 3)
    comm.wait()


# ---- what is refused -------------------------------------------------------------------------------------------------


@on_threads(1)
def test_bad_arguments_are_named_and_break_nothing(comm):
    x = torch.ones(4)
    for error, text, call in [
        (TypeError, "tensor must be a tensor, not list", lambda: comm.all_reduce([1.0])),
        (
            TypeError,
            "tensor has dtype torch.complex64; NCCL knows",
            lambda: comm.broadcast(x.to(torch.complex64), 0),
        ),
        (TypeError, "tensor has dtype torch.bool", lambda: comm.all_reduce(x.bool())),
        (TypeError, r"view\(torch.uint8\)", lambda: comm.send(x.to(torch.int16), 0)),
        (TypeError, "float32 and out torch.float64", lambda: comm.all_reduce(x, out=x.double())),
        (ValueError, "all_reduce of test: tensor is on meta, but .* cpu", lambda: comm.all_reduce(x.to("meta"))),
        (ValueError, "not contiguous; pass tensor.contig", lambda: comm.all_reduce(x.view(2, 2).t())),
        (ValueError, "not contiguous", lambda: comm.all_reduce(x.to_sparse())),
        (
            ValueError,
            "out has 3 elements; on 1 ranks it must have 4",
            lambda: comm.all_reduce(x, out=torch.ones(3)),
        ),
        (ValueError, "output has 8 elements; .* have 4", lambda: comm.all_gather(torch.ones(8), x)),
        (ValueError, "tensor has 4 elements; .* have 8", lambda: comm.reduce_scatter(torch.ones(8), x)),
        (ValueError, "dst is 1; the ranks .* 0 to 0", lambda: comm.reduce(x, 1)),
        (ValueError, "src is -1", lambda: comm.recv(x, -1)),
        (ValueError, "src is True", lambda: comm.broadcast(x, True)),
        (ValueError, "NCCL does not reduce with BXOR; it has SUM", lambda: comm.all_reduce(x, ReduceOp.BXOR)),
        (ValueError, r"input_splits is \[3\]", lambda: comm.all_to_all(x, x.clone(), input_splits=[3])),
        (TypeError, "registered_empty got dtype torch.int16", lambda: comm.registered_empty(1, torch.int16)),
        (ValueError, "registered_empty got numel -1", lambda: comm.registered_empty(-1)),
        (ValueError, "empty tensor", lambda: comm.register(torch.ones(0))),
    ]:
        refused(error, text, call)
    comm.all_reduce(x)
    assert x.tolist() == [1] * 4


def test_patience_is_positive(ranks):
    refused(ValueError, "timeout -1; it must be more than 0 seconds", ranks, 1, lambda comm: None, timeout=-1)


@on_threads(2)
def test_parts_that_do_not_divide(comm):
    refused(
        ValueError,
        "3 elements cannot be cut into 2 equal parts.*input_splits",
        comm.all_to_all,
        torch.ones(2),
        torch.ones(3),
    )


def test_an_error_of_nccl_aborts_and_is_repeated(ranks, fake):
    def body(comm):
        comm.all_reduce(torch.ones(3))
        fake.fail("ncclAllReduce", 1)
        first = refused(RuntimeError, "", comm.all_reduce, torch.ones(5))
        for part in ('"test", rank 0 of 1', "all_reduce of 5 x fp32, its call 2", "unhandled cuda error", comm.library):
            assert part in str(first)
        assert str(refused(RuntimeError, "", comm.broadcast, torch.ones(1), 0)) == str(first)

    ranks(1, body)
    assert (fake.count("aborted"), fake.count("destroyed")) == (1, 0)


def test_an_error_that_comes_later(ranks, fake):
    def body(comm):
        comm.all_gather(torch.empty(6), torch.ones(6))
        fake.fail_later(6)
        refused(RuntimeError, "all_gather of 6 x fp32.*remote process exited", comm.wait)

    ranks(1, body)
    assert fake.count("aborted") == 1


@on_threads(1)
def test_abort_by_its_owner(comm):
    comm.abort("there is better to do")
    refused(RuntimeError, "rank 0 of 1 was aborted: there is better to do", comm.all_reduce, torch.ones(1))


@on_threads(2)
def test_ranks_that_differ(comm):
    refused(
        RuntimeError,
        f"rank {comm.rank} of 2: all_reduce .* failed: invalid usage",
        comm.all_reduce,
        torch.ones(3 + comm.rank),
    )


# ---- user buffers and what stays alive -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_registered_memory_is_an_ordinary_tensor(ranks, fake, dtype):
    def body(comm):
        x = comm.registered_empty(7, dtype)
        assert (x.shape, x.dtype, x.device.type, x.is_contiguous()) == ((7,), dtype, "cpu", True)
        x.copy_(values(comm.rank, 7, dtype))
        comm.broadcast(x, 0)
        assert x.equal(values(0, 7, dtype))
        assert (fake.count("memory"), fake.count("registrations")) == (1, 1)
        assert comm.registered_empty(0, dtype).numel() == 0

    ranks(1, body)
    assert fake.count("deregistrations") == 1


def test_memory_lives_as_long_as_a_view_of_it(ranks, fake):
    def body(comm):
        x = comm.registered_empty(8)
        x.fill_(3)
        tail = x.view(2, 4)[1]
        del x
        assert fake.count("memory") == 1
        comm.all_reduce(tail)
        assert tail.tolist() == [3] * 4
        del tail
        assert (fake.count("memory"), fake.count("deregistrations")) == (0, 1)
        return comm.registered_empty(2).fill_(5)

    (left,) = ranks(1, body)  # the communicator is closed
    assert fake.count("alive") == 0 and left.tolist() == [5, 5] and fake.count("deregistrations") == 2


def test_memory_is_waited_for_before_it_goes(ranks, fake, monkeypatch):
    waited = []
    monkeypatch.setattr(nccl_join, "_synchronize", lambda kind, index: waited.append(fake.count("memory")))

    def body(comm):
        x = comm.registered_empty(8)
        assert waited == []
        del x
        assert waited and set(waited) == {1}

    ranks(1, body)


@on_threads(2)
def test_tensors_that_die_in_another_thread_while_a_call_waits(comm):
    """Neither the interpreter's lock nor the communicator's is held while the other is waited for."""
    for _ in range(50):
        other = started([comm.registered_empty(4)].clear)
        with comm.group():
            comm.all_reduce(torch.ones(2))
        other.result()


@on_threads(1)
def test_registering_what_is_there(comm, fake):
    x = torch.ones(4)
    handle = comm.register(x)
    assert fake.count("registrations") == 1
    handle.release()
    handle.release()
    assert fake.count("deregistrations") == 1
    comm.register(x)  # dropped at once
    assert (fake.count("registrations"), fake.count("deregistrations")) == (2, 2)


def test_a_dropped_communicator_does_not_wait_for_anybody(ranks, path, fake, monkeypatch):
    group = types.SimpleNamespace(rank=0, size=1, id=find_library(path).make_id())
    comm = NcclCommunicator(group, device="cpu", library=path)
    text = repr(comm)
    assert "a group of 1" in text and "rank 0 of 1" in text and "2.28.9" in text
    del comm
    gc.collect()
    assert (fake.count("alive"), fake.count("aborted")) == (0, 1)


def test_a_rank_that_does_not_come_to_the_join_is_named(path, fake):
    store = torch.distributed.HashStore()
    store.set("facts1", nccl_join._to_text((None, None, ("2.28.9", path))))
    wait = nccl.timedelta(seconds=0.2)
    text = "communicator 'mine' cannot be made: ranks 2, 3 of its 4 ranks did not come within 0.2 s"
    refused(RuntimeError, text, nccl_join.join_by_store, store, "mine", 0, 4, wait, torch.device("cpu"), path)
    assert fake.count("created") == 0


# ---- the library -----------------------------------------------------------------------------------------------------


def test_an_old_nccl_has_all_but_user_buffers(tmp_path):
    library = find_library(build(tmp_path, "libfake_old.so", "FAKE_NCCL_OLD"))
    assert (library.version, library.has_buffers) == (21803, False)
    id, wait = library.make_id(), nccl.timedelta(seconds=5)
    comm = _native._C.NcclCommunicator(library, id, "old", 0, 1, wait, lambda: None, "cpu")
    refused(
        RuntimeError,
        r"libfake_old.so is NCCL 2.18.3 and has no ncclMemAlloc: .* 2.19 or later",
        comm.allocate,
        16,
        "cpu",
    )
    comm.close()


def test_what_is_no_nccl_or_not_there(tmp_path):
    refused(RuntimeError, "NCCL cannot be opened from /nowhere/nccl.so.*No such file", find_library, "/nowhere/nccl.so")
    refused(RuntimeError, "libc.so.6 has no ncclGetVersion. NCCL 2.14 or later is needed", find_library, "libc.so.6")
    broken = build(tmp_path, "libfake_broken.so", "FAKE_NCCL_BROKEN")
    refused(RuntimeError, "libfake_broken.so is NCCL 2.28.9 and has no ncclAllReduce", find_library, broken)


SEARCH = """
import sys, torch
import deepspeed.comm
from deepspeed.comm.nccl import find_library
def loaded():
    return any("libnccl" in line or "libfake" in line for line in open("/proc/self/maps"))
before = loaded()
try:
    print(find_library().path)
except (RuntimeError, ValueError) as error:
    print(type(error).__name__, error)
print("import loads it:", before and not torch.version.cuda)
"""


def search(**env):
    done = run_after_torch(SEARCH, **env)
    assert done.returncode == 0 and "import loads it: False" in done.stdout, done.stderr
    return done.stdout


def test_the_environment_names_a_library_unless_torch_has_one(path):
    found = search(DS_NCCL_LIBRARY=path)
    if torch.version.cuda:  # torch links its own
        assert "ValueError DS_NCCL_LIBRARY names" in found and "two NCCLs" in found and "LD_PRELOAD" in found
        assert "libnccl.so.2" in search(DS_NCCL_LIBRARY="")
    else:
        assert found.startswith(path)
        assert "RuntimeError NCCL cannot be opened from /nowhere" in search(DS_NCCL_LIBRARY="/nowhere")


@pytest.mark.skipif(bool(torch.version.cuda), reason="this torch brings its own NCCL")
def test_the_package_of_pip_is_looked_for_on_the_path(path, tmp_path):
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    os.symlink(path, folder / "libnccl.so.2")
    found = search(PYTHONPATH=os.pathsep.join([PYTHON, str(tmp_path)]), DS_NCCL_LIBRARY="")
    assert found.startswith(str(folder))

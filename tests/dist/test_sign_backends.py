"""The published backends of a compressed all-reduce, and the transports of ``comm_backend_name``."""

import sys
import types

import pytest
import torch

import deepspeed
from deepspeed.runtime.comm.compressed import CompressedBackend
from deepspeed.runtime.comm.mpi import MpiBackend
from deepspeed.runtime.comm.nccl import NcclBackend
from harness import on_ranks
from onebit_models import KINDS, start, train
from refusals import refused
from runs import identical, together, weights


def signs(x):
    return torch.where(x >= 0, 1.0, -1.0)


def model(values, errors, owned):
    """The exchange of all ranks in one place, in fp64; ``errors`` and ``owned`` are updated."""
    ranks, numel = len(values), values[0].numel()
    sent = []
    for x, error in zip(values, errors):
        x = x.double() + error[:numel]
        sent.append(signs(x) * x.square().mean().sqrt())
        error[:numel] = x - sent[-1]
    mean = sum(sent) / ranks
    for owner in range(ranks):
        part = slice(owner * -(-numel // ranks), min((owner + 1) * -(-numel // ranks), numel))
        x = mean[part] + owned[owner][: mean[part].numel()]
        mean[part] = signs(x) * x.square().mean().sqrt()
        owned[owner][: x.numel()] = x - mean[part]
    return mean


class FakeMpi:
    """As much of mpi4py.MPI as is used, over the ranks of the test. ``sizes``: bytes that have travelled."""

    def __init__(self):
        self.COMM_WORLD, self.sent = self, 0
        self.Get_size, self.Get_rank = deepspeed.comm.get_world_size, deepspeed.comm.get_rank

    def Alltoall(self, given, taken):
        self.sent += given.nbytes
        deepspeed.comm.all_to_all_single(torch.from_numpy(taken).view(-1), torch.from_numpy(given).view(-1))

    def Allgather(self, given, taken):
        self.sent += given.nbytes
        deepspeed.comm.all_gather_into_tensor(torch.from_numpy(taken).view(-1), torch.from_numpy(given).view(-1))


@pytest.fixture
def no_mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)


def with_mpi(patch):
    fake = FakeMpi()
    patch.setitem(sys.modules, "mpi4py", types.ModuleType("mpi4py"))
    patch.setitem(sys.modules, "mpi4py.MPI", fake)
    return fake


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("numel", [1, 13, 1000])
@on_ranks(init=True)
def test_all_backends_equal_a_model(rank, world, numel):
    with pytest.MonkeyPatch.context() as patch:
        fake = with_mpi(patch)
        backends = [NcclBackend(), CompressedBackend(), MpiBackend(cuda_aware=False)]
        room = -(-numel // (8 * world)) * 8 * world
        kept = [(torch.zeros(room), torch.zeros(room // world)) for _ in backends]
        errors = [torch.zeros(room).double() for _ in range(world)]
        owned = [torch.zeros(room // world).double() for _ in range(world)]
        for step in range(3):
            x = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))
            mean = model(together(x), errors, owned)
            found = []
            for backend, (mine, as_owner) in zip(backends, kept):
                buffer = x.clone()
                assert backend.compressed_allreduce(buffer, mine, as_owner, rank) is buffer
                found.append((buffer, mine, as_owner))
            assert all(identical(one, found[0]) for one in found), "backends have other bits"
            assert (found[0][0] - mean).abs().max() < 1e-5
            assert (found[0][1] - errors[rank]).abs().max() < 1e-5
            assert (found[0][2] - owned[rank]).abs().max() < 1e-5
            errors[rank].copy_(found[0][1])
            owned = [one.double() for one in together(found[0][2])]
            errors = [one.double() for one in together(found[0][1])]
        assert fake.sent > 0
        refused(ValueError, "worker_error must be a contiguous fp32", backends[0].compressed_allreduce, x, x[:0], x, 0)
        refused(ValueError, "buffer_m must be", backends[0].compressed_allreduce, x.double(), x, x, 0)


@on_ranks(1, init=True)
def test_signs_as_bytes(rank, world):
    backend = CompressedBackend()
    packed = backend.pack(torch.tensor([1.0, -1, 0, -0.0, -2, 3, 4, -5] + [-1.0] * 8), 2)
    assert packed.tolist() == [[0b10110110], [0]] and packed.dtype == torch.uint8
    signs_of = backend.unpack(packed.flatten(), 2, torch.float16)
    assert signs_of.tolist() == [[1, -1, 1, 1, -1, 1, 1, -1], [-1] * 8] and signs_of.dtype == torch.float16
    refused(ValueError, "uint8", backend.unpack, torch.zeros(3), 1, torch.float32)


@pytest.mark.parametrize("kind", sorted(KINDS))
@on_ranks(2, init=True)
def test_all_transports_of_an_engine_have_equal_bits(rank, world, kind):
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        fake = with_mpi(patch)
        for name in ("nccl", "compressed", "mpi"):
            engine = start(kind, params={"comm_backend_name": name})
            train(engine, rank, 6)
            found[name] = weights(engine)
            assert (fake.sent > 0) is (name == "mpi")
    assert identical(found["nccl"], found["mpi"]) and identical(found["nccl"], found["compressed"])


@on_ranks(2, init=True)
def test_mpi_of_another_size_is_refused(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        fake = with_mpi(patch)
        fake.Get_size = lambda: 3
        refused(RuntimeError, "MPI has 3 ranks and this job has 2", MpiBackend, True)


def test_without_mpi4py_one_error_says_so(no_mpi):
    refused(RuntimeError, r"deepspeed\[1bit_adam\]", MpiBackend, False)

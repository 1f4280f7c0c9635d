"""Bytes that travel by mpi4py, for exchanges of signs (``comm_backend_name`` "mpi")."""

import importlib

import torch

from deepspeed import _native
from deepspeed.accelerator import get_accelerator


def mpi():
    """The module ``mpi4py.MPI``; RuntimeError where it is not installed."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        raise RuntimeError(
            'comm_backend_name "mpi" needs the Python package mpi4py, which is not installed: pip install '
            'deepspeed[1bit_adam], or use "nccl" or "compressed", which send over the transport that the engine has'
        ) from error


def mpi_communicator(cuda_aware):
    """A native communicator over all ranks of MPI. ``cuda_aware``: MPI reads and writes memory of the device; else
    bytes pass through the host. The process group of all ranks has to have as many."""
    ranks, world = mpi().COMM_WORLD, torch.distributed.get_world_size()
    if ranks.Get_size() != world:
        raise RuntimeError(
            f'comm_backend_name "mpi": MPI has {ranks.Get_size()} ranks and this job has {world}. Start it with '
            "mpirun, or with deepspeed --launcher openmpi or mvapich"
        )
    calls = {"all_to_all": ranks.Alltoall, "all_gather": ranks.Allgather}

    def call(verb, given, taken):
        if cuda_aware and not given.is_cpu:
            # MPI knows nothing of streams. It takes both tensors by their __cuda_array_interface__.
            get_accelerator().synchronize()
            calls[verb](given, taken)
            return
        own = torch.empty_like(taken, device="cpu")
        calls[verb](given.cpu().numpy(), own.numpy())
        taken.copy_(own)

    return _native._C.caller_communicator(ranks.Get_rank(), world, "mpi", call)

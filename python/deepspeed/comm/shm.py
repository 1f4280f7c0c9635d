"""The backend ``shm`` of torch.distributed: collectives through shared memory between the ranks of one host.

    deepspeed.init_distributed(dist_backend="shm")        # or torch.distributed.init_process_group("shm")

CPU tensors of any dtype in every collective; reductions are formed in rank order, 16-bit floats in fp32, so all ranks
and all runs get the same bits. It is a native communicator behind torch's interface of a backend
(csrc/comm/scripts/c10d_backend.h), over a gloo group made beside it. That one carries messages and the rest: sparse
tensors, tensors of other devices, and collectives where ranks are on several hosts.
"""

import torch
import torch.distributed as dist

from deepspeed import _native
from deepspeed._compat import TORCH2
from deepspeed.comm import group_communicators
from deepspeed.comm.gloo import meet
from deepspeed.comm.watch import group_facts

NAME = "shm"


def create(store, rank, size, timeout):
    gloo, group = meet(dist.PrefixStore("gloo", store), rank, size, timeout)
    facts = group_facts("torch.distributed")
    communicator = _native._C.Communicator(group, shared=True, timeout=timeout, facts=facts, scripts=True)
    return _native._C.c10d_backend(communicator, gloo, NAME)


def _behind(group):
    """The communicator of a group of this backend, so that calls of torch and of ``deepspeed.comm`` keep one order."""
    backend = group._get_backend(torch.device("cpu")) if TORCH2 else group
    return _native._C.communicator_of(backend)


def register():
    """Makes the backend known to torch.distributed and to ``deepspeed.comm``; again: nothing happens."""
    group_communicators.native_backends[NAME] = _behind
    if dist.is_available() and not hasattr(dist.Backend, NAME.upper()) and hasattr(dist, "ProcessGroupGloo"):
        dist.Backend.register_backend(NAME, create, **({"devices": ["cpu"]} if TORCH2 else {}))

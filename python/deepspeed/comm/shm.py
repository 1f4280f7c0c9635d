"""The backend ``shm`` of torch.distributed: collectives through shared memory between the ranks of one host.

    deepspeed.init_distributed(dist_backend="shm")        # or torch.distributed.init_process_group("shm")

CPU tensors of any dtype in every collective; reductions are formed in rank order, 16-bit floats in fp32, so all ranks
and all runs get the same bits. What it does not carry (send and receive, sparse tensors, tensors of other devices, or
everything where ranks are on several hosts) goes through a gloo group made beside it.
"""

import torch.distributed as dist

from deepspeed import _native
from deepspeed._compat import TORCH2
from deepspeed.comm.watch import group_facts

NAME = "shm"


def create(store, rank, size, timeout):
    other = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    store, facts = dist.PrefixStore("shm", store), group_facts("torch.distributed")
    return _native._C.shm_backend(store=store, rank=rank, size=size, timeout=timeout, other=other, facts=facts)


def register():
    """Makes the backend known to torch.distributed; again: nothing happens."""
    if dist.is_available() and not hasattr(dist.Backend, NAME.upper()) and hasattr(dist, "ProcessGroupGloo"):
        dist.Backend.register_backend(NAME, create, **({"devices": ["cpu"]} if TORCH2 else {}))

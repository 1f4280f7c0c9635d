"""Groups over gloo that their members make alone."""

import torch.distributed as dist

from deepspeed._compat import group_around


def meet(store, rank, size, timeout):
    """``(backend, group)`` of ``size`` ranks that meet in ``store``; all of them call it. torch.distributed's tables do
    not know the group."""
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    complete(gloo)
    return gloo, group_around(gloo, "gloo", store, rank, size)


def complete(group):
    """Returns when all ranks of a new group have it. gloo's constructor returns on each rank as soon as that rank is
    connected. If the rank drops its group then, for example because the engine refuses its configuration, the
    constructors of ranks that are slower fail: "Connection closed by peer"."""
    group.barrier().wait()

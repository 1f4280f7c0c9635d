"""The hosts of ranks."""

import torch.distributed

from deepspeed._native import _C
from deepspeed.comm import mesh
from deepspeed.comm import process_group as dist


def hosts_of(group):
    """The host of each rank of ``group``: equal values for ranks of one host. Its ranks call it together; in a plan
    each knows the answer."""
    if mesh.made_here().planned:
        job = mesh.job(group)
        return [job.planned_host(rank) for rank in dist.get_all_ranks_from_group(group)]
    every = [None] * dist.get_world_size(group)
    torch.distributed.all_gather_object(every, _C.host_id(), group=group)
    return every


def runs_of_hosts(hosts, ranks=None):
    """The largest number of neighbours that share a host wherever a multiple of it begins. ``hosts``: of each rank. The
    number divides ``ranks`` (None: how many there are)."""
    ranks = len(hosts) if ranks is None else ranks

    def fits(size):
        return all(len(set(hosts[start : start + size])) == 1 for start in range(0, len(hosts), size))

    return max(size for size in range(1, ranks + 1) if ranks % size == 0 and fits(size))

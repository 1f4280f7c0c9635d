"""The only maker of groups of ranks: torch's process groups, and what the native communicators of an engine go over.

``new_group`` and ``init_device_mesh`` are torch's: every rank of the job calls them, in one order, and each call makes
groups. All other groups are made by their members alone, who meet in the job's store under the names of their ranks:
nobody else takes part, whatever else it does meanwhile. Ranks that are in several ask for them in one order.
"""

import functools
import os
import weakref

import torch
import torch.distributed as dist

from deepspeed import _native
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import gloo, group_communicators, nccl_join, shm
from deepspeed.comm.timeouts import default_timeout
from deepspeed.comm.watch import board_store, group_facts


class _Made:
    """The groups and communicators that this process has made in its job."""

    def __init__(self):
        self.job = dist.group.WORLD
        self.planned = False  # whether the other ranks do not exist (join_planned)
        self.earlier = []  # of a planned job: what the process that this one was forked from goes on with
        self.groups = {}  # ranks -> torch's group
        self.counts = {}  # ranks -> how often that was made
        self.views = {}  # name -> Members (mesh_views.py)
        self.jobs = {}  # backend -> native Job
        self.gathers = {}  # ranks -> native Communicator (mesh_views.py)
        self.tensors = {}  # the same, for layers that are cut
        self.tensor_exchanges = weakref.WeakKeyDictionary()  # of these -> {overlap: TensorExchange} (layers.py)
        self.exchanges = weakref.WeakKeyDictionary()  # native communicator -> its exchange (sequence/exchange.py)
        self.uneven_heads = set()  # ranks that have cut heads into unequal runs (sequence/exchange.py)
        self.stores = {}  # (device, folder) -> tensors that wait for backward (utils/waiting_tensors.py)
        self.sequences = {}  # ranks -> engines (weakly) that train sequences they share (sequence/gradients.py)


_made = None


def made_here():
    """The groups of this job; those of a job that has ended are others."""
    global _made
    job = dist.group.WORLD if dist.is_initialized() else None
    if _made is None or _made.job is not job:
        _made = _Made()
    return _made


def _tables():
    """torch's, of the groups that this process is in: their backends, their names and their ranks."""
    c10d = dist.distributed_c10d
    return c10d._pg_map, c10d._pg_names, c10d._pg_group_ranks


def known_groups():
    """torch's groups of this process, where a planned job can take them over: a group of torch 1.13 has one backend for
    all devices and cannot get another one."""
    taken = hasattr(dist.ProcessGroup, "_register_backend")
    return [group for group in _tables()[-1] if taken and isinstance(group, dist.ProcessGroup)]


def new_group(ranks):
    """torch's: every rank of the job calls it, members or not."""
    made = dist.new_group(ranks, timeout=default_timeout())
    group_communicators.add_memory(made)
    return made


def init_device_mesh(device, mesh_shape, mesh_dim_names):
    """torch's ``DeviceMesh`` over all ranks; RuntimeError on a torch older than 2.2."""
    if not hasattr(dist, "init_device_mesh"):
        raise RuntimeError(
            f"a device mesh needs torch 2.2 or later, this is {torch.__version__}: pass process groups (mpu) "
            f"instead of mesh_param, or use a newer torch."
        )
    return dist.init_device_mesh(device, mesh_shape, mesh_dim_names=mesh_dim_names)


def group_over(ranks):
    """torch's group of ``ranks``, this one among them: the same one at every call. Made by its members alone."""
    made, ranks = made_here(), sorted(ranks)
    key = tuple(ranks)
    if key not in made.groups:
        number = made.counts[key] = made.counts.get(key, -1) + 1
        job = "planned" if made.planned else "deepspeed"  # torch 2 still knows the names of the job before
        name = f"{job}/{'_'.join(map(str, ranks))}/{number}"
        made.groups[key] = _meet(ranks, name, dist.get_backend())
        group_communicators.add_memory(made.groups[key])
    return made.groups[key]


def forget(group=None):
    """``group`` (None: all of them) is about to be destroyed."""
    global _made
    if group is None or group is dist.group.WORLD:
        _made = None
    elif _made is not None:
        _made.groups = {ranks: kept for ranks, kept in _made.groups.items() if kept is not group}


def job(group):
    """The native ``Job`` whose communicators go over what torch's ``group`` goes over."""
    made, backend = made_here(), None if group is None else dist.get_backend(group)
    if backend not in made.jobs:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        made.jobs[backend] = _native._C.Job(rank, world, functools.partial(_open, backend))
    return made.jobs[backend]


def join_planned(backend, rank, world, job):
    """Makes this process rank ``rank`` of a job of ``world`` ranks that do not exist, for the rest of its life: torch's
    groups have the backend ``backend``, which moves nothing. ``job``: the native one. Groups of an earlier job are kept
    and out of sight; they are not ended, because that job goes on in the process that this one was forked from."""
    c10d = dist.distributed_c10d
    kept = [made_here(), getattr(c10d, "_world", None), *map(dict, _tables())]
    for table in _tables():
        table.clear()
    if hasattr(c10d, "_world"):
        c10d._world = c10d._World()
    made = c10d._new_process_group_helper(
        world, rank, [], dist.Backend(backend), dist.HashStore(), group_name="planned", timeout=default_timeout()
    )
    group = made[0] if isinstance(made, tuple) else made
    _tables()[-1][group] = {each: each for each in range(world)}
    c10d._update_default_pg(group)
    made_here().jobs[backend], made_here().planned, made_here().earlier = job, True, kept


def take_over_groups():
    """In a planned job on torch 2: a group of the earlier job, with this rank in it, becomes a group of this one with
    the same ranks, so that an mpu or layers that have it can be used here. Returns what the earlier job had made."""
    kept = made_here().earlier
    for group, ranks in list(kept[-1].items()):
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank() not in ranks:
            continue
        twin = group_over(ranks)
        for table in _tables():
            table[group] = table[twin]
        made_here().earlier = [group_communicators.forget(group), *made_here().earlier]
        for device in ("cpu", "meta"):
            backend = twin._get_backend(torch.device(device))
            group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    return kept[0]


def _open(backend, key, ranks, in_memory=False):
    """A native communicator, and what it goes over: that ends with its last holder, without the interpreter's lock,
    which gloo's threads may need. torch's tables do not know it. ``in_memory``: ranks of one host exchange through its
    memory."""
    store = dist.PrefixStore(f"deepspeed/{backend}/{key}", dist.distributed_c10d._get_default_store())
    rank, size, timeout = ranks.index(dist.get_rank()), len(ranks), default_timeout()
    nccl = None
    direct = backend == "nccl" or get_accelerator()._nccl_library is not None
    if direct and os.environ.get("DS_NCCL_DIRECT") != "0":
        nccl = nccl_join.join_by_store(dist.PrefixStore("nccl", store), key, rank, size, timeout)
    if nccl is not None or backend in ("gloo", shm.NAME):  # gloo carries what lies in host memory
        group = gloo.meet(store, rank, size, timeout)[1]
    else:
        group = _meet(ranks, f"deepspeed/{key}", backend)
    made = _native._C.Communicator(
        group,
        shared=backend == shm.NAME,
        timeout=timeout,
        facts=group_facts(key),
        store=board_store(f"{backend}/{key}"),
        nccl=nccl,
    )
    if not in_memory:
        return made
    return _native._C.Communicator(made, shared=True, timeout=timeout, facts=group_facts("data parallel"))


def _meet(ranks, name, backend):
    """A group of torch's, in its tables. What ``new_group`` of torch 1.13 does, without its wait for everybody else."""
    c10d = dist.distributed_c10d
    made = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend),
        c10d._get_default_store(),
        group_name=name,
        timeout=default_timeout(),
    )
    group = made[0] if isinstance(made, tuple) else made  # torch 2.x: and its store
    _tables()[-1][group] = {rank: index for index, rank in enumerate(ranks)}
    if backend == "gloo":
        gloo.complete(group)
    return group

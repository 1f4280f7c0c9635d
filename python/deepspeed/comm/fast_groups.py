"""Collectives of ``deepspeed.comm`` on CPU tensors go through shared memory where the ranks of a group share a host.

Groups that ``deepspeed.comm`` makes over gloo, the first one included, get a second group of the same ranks beside
them, which carries CPU tensors in memory. torch's own functions, and ranks of several hosts, go on using the first.
It is made together with the first, not when it is needed: ranks may come to two groups in different orders.
``DS_SHM_COLLECTIVES=0`` makes none.
"""

import os
import weakref

import torch
import torch.distributed as dist

from deepspeed import _native
from deepspeed.comm import gloo, shm

# Group over gloo -> the one beside it. Weak: torch decides when a group ends.
_beside = weakref.WeakKeyDictionary()
# Kinds of numbers that memory does not reduce in every way: gloo.py refuses them, or knows what to do.
_LEFT = {torch.complex32, torch.complex64, torch.complex128} | gloo.FLOAT8


def _backend(group):
    return group._get_backend(torch.device("cpu")) if hasattr(group, "_get_backend") else group


def wanted(size):
    """Whether a group of ``size`` ranks over the job's backend gets a second one."""
    known = hasattr(dist.Backend, shm.ALONE.upper())
    return dist.get_backend() == "gloo" and size > 1 and known and os.environ.get("DS_SHM_COLLECTIVES") != "0"


def put(group, beside):
    """``beside``, of the backend ``shm.ALONE``, carries for ``group`` where the ranks share a host; else it ends."""
    if dist.get_rank(beside) < 0:
        return
    if _native._C.shares_memory(_backend(beside)):
        _beside[group] = beside
    else:
        dist.destroy_process_group(beside)


def chosen(group, tensor):
    """The group that carries ``tensor``: the one beside ``group`` (None: all ranks), else ``group`` itself."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.dtype in _LEFT or not _beside:
        return group
    group_or_all = dist.group.WORLD if group is None else group
    # Who is no member holds a plain object instead.
    return _beside.get(group_or_all, group) if isinstance(group_or_all, dist.ProcessGroup) else group


def forget(group=None):
    """``group`` (None: all of them) is about to be destroyed."""
    if group is None or group is dist.group.WORLD:
        _beside.clear()
        return
    made = _beside.pop(group, None) if isinstance(group, dist.ProcessGroup) else None
    if made is not None:
        dist.destroy_process_group(made)

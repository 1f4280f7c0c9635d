"""Native communicators that run the verbs of ``deepspeed.comm``, one for each group and kind of device.

CPU tensors: groups that ``deepspeed.comm`` makes, the first one included, move them through shared memory if all ranks
are on one host. Such a communicator is made together with its group and not at first use, because ranks may use two
groups in different orders. ``DS_SHM_COLLECTIVES=0`` turns shared memory off. Other groups over gloo, including those
that torch makes, use gloo, as messages between two ranks always do. Tensors of other devices travel through the group's
own backend for the device (NCCL), so calls of ``deepspeed.comm`` and of ``torch.distributed`` keep one order.
csrc/comm/calls/compose.cpp adds the verbs and dtypes that a backend lacks, and csrc/comm/boards/store_board.h finds
calls that do not match.
"""

import os
import weakref

import torch
import torch.distributed as dist

from deepspeed import _native
from deepspeed.comm.reduce_op import core_name
from deepspeed.comm.timeouts import default_timeout
from deepspeed.comm.watch import board_store, group_facts

# torch's group -> kind of device -> GroupCommunicator; None if torch's own functions run its collectives. The keys are
# weak because torch decides when a group ends; the entry then releases its reference to the job's store.
_known = weakref.WeakKeyDictionary()
_OVER_TORCH = "over torch"  # the key of a communicator of native_of()
# Backends whose groups run every collective by a communicator of their own: name -> function that makes it for a group.
native_backends = {}
ANY_RANK = _native._C.ScriptCalls.ANY_RANK  # the peer of a receive that takes the next message


class GroupCommunicator:
    """Runs the collectives of one group on tensors of one kind of device, as one of its ranks."""

    def __init__(self, group, device, shared):
        make = native_backends.get(_backend_of(group, device))
        if make is not None:
            self._take(make(group))
            return
        name, on_device = _name_of(group), device != "cpu" and not _is_gloo(group, device)
        name = f"{name}/{device}" if on_device else name
        native = _native._C.Communicator(
            group,
            shared=shared,
            timeout=default_timeout(),
            facts=group_facts(name),
            store=board_store(name),
            scripts=not on_device,
            on_device=on_device,
        )
        self._take(native)

    def _take(self, native):
        self.native, self.in_memory = native, native.name == "shm"
        # run(verb, given, taken, detached=False, op="sum", peer=-1, splits=([], []), tag=0): see
        # csrc/comm/scripts/script_calls.h. torch's ``Work`` if it is detached, else None at the end of the call.
        self.run = _native._C.ScriptCalls(native).call


def _backend_of(group, device):
    """The name of the backend that carries tensors of ``device`` in ``group``; "" where there is none. gloo carries
    those of every device, through the host."""
    if not hasattr(group, "_get_backend"):  # torch 1.13: a group has one backend
        return str(dist.get_backend(group))
    try:
        return group._get_backend(torch.device(device)).name()
    except RuntimeError:
        return "gloo" if device != "cpu" and _is_gloo(group, "cpu") else ""


def _is_gloo(group, device):
    return _backend_of(group, device) == "gloo"


def _carried(group, device):
    """Whether a native communicator over ``group`` carries tensors of ``device``."""
    backend = _backend_of(group, device)
    if backend in native_backends:
        return True
    return _is_gloo(group, device) if device == "cpu" else device != "meta" and backend != ""


def _name_of(group):
    module = dist.distributed_c10d
    names = module._world.pg_names if hasattr(module, "_world") else module._pg_names
    return str(names[group])


def _make(group, device, shared):
    ours, made = dist.get_rank(group) >= 0 and _carried(group, device), _known.setdefault(group, {})
    if ours and device != "cpu" and _is_gloo(group, device):
        if "cpu" not in made:
            _make(group, "cpu", shared=False)
        if made["cpu"] and not made["cpu"].in_memory:  # calls with tensors here and there are compared with each other
            made[device] = made["cpu"]
            return made
    made[device] = GroupCommunicator(group, device, shared) if ours else None
    return made


def add_memory(group):
    """Prepares shared memory for ``group``. All members call this right after they have made the group."""
    if isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) > 1:
        _make(group, "cpu", shared=os.environ.get("DS_SHM_COLLECTIVES") != "0")


class ServedByTorch(Exception):
    """No communicator of ours runs the call: torch's own function does."""


def of(group, tensor, op=None, parts=()):
    """The ``GroupCommunicator`` that runs a call with ``tensor`` (None: a barrier) in ``group`` (None: all ranks).

    ``ServedByTorch``: for sparse tensors, for reductions of complex tensors and with an ``op`` of torch's that has no
    name here (premultiplied sums), for ``parts`` of several sizes on a device, and in groups of other backends.
    """
    device = "cpu" if tensor is None or tensor.is_cpu else tensor.device.type
    group = all_ranks() if group is None else group
    made = _known.get(group, ()) if isinstance(group, dist.ProcessGroup) else {device: None}  # what no member has
    if device not in made:
        made = _make(group, device, shared=False)
    strange = tensor is not None and (
        tensor.layout is not torch.strided
        or (op is not None and (core_name(op) is None or tensor.is_complex()))
        or (device != "cpu" and len({part.numel() for part in parts}) > 1)
    )
    if strange or made[device] is None:
        raise ServedByTorch
    return made[device]


def all_ranks():
    """torch's group of all ranks; RuntimeError before there is one."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "there is no process group yet: call deepspeed.init_distributed() or deepspeed.initialize() first."
        )
    return group


def native_of(group, tensor):
    """The native communicator that carries tensors like ``tensor`` in ``group``. Where torch's own functions run the
    collectives of scripts, it is made over torch's group, and kept."""
    group = all_ranks() if group is None else group
    try:
        return of(group, tensor).native
    except ServedByTorch:
        made = _known.setdefault(group, {})
        if _OVER_TORCH not in made:
            made[_OVER_TORCH] = _native._C.Communicator(group)
        return made[_OVER_TORCH]


def rank_in(group, rank):
    """The number of global rank ``rank`` in ``group``."""
    return rank if group is None or group is dist.group.WORLD else dist.get_group_rank(group, rank)


def forget(group=None):
    """Drops the communicators of ``group`` (None: of all groups), which is about to be destroyed. Returns those of one
    group."""
    if group is None or group is dist.group.WORLD:
        _known.clear()
    elif isinstance(group, dist.ProcessGroup):
        return _known.pop(group, None)
    return None


def known():
    """All communicators of this process; None stands for a group that torch's own functions serve."""
    return list(dict.fromkeys(made for of_group in _known.values() for made in of_group.values()))

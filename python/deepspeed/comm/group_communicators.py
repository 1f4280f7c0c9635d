"""Native communicators that run the collectives of ``deepspeed.comm`` on CPU tensors, one for each group over gloo.

Groups that ``deepspeed.comm`` makes, the first one included, move tensors through shared memory if all ranks are on one
host. Such a communicator is made together with its group and not at first use, because ranks may use two groups in
different orders. ``DS_SHM_COLLECTIVES=0`` turns shared memory off. All other groups, including those that torch makes,
use gloo; csrc/comm/calls/compose.cpp adds the verbs and dtypes that gloo lacks, and csrc/comm/boards/store_board.h
finds calls that do not match. This module does not handle tensors of other devices, nor calls of torch's own functions.
"""

import os
import weakref

import torch
import torch.distributed as dist

from deepspeed import _native
from deepspeed.comm.reduce_op import to_name
from deepspeed.comm.timeouts import default_timeout
from deepspeed.comm.watch import board_store, group_facts

# torch's group -> GroupCommunicator; None if torch's own functions run its collectives. The keys are weak because torch
# decides when a group ends; the entry then releases its reference to the job's store.
_known = weakref.WeakKeyDictionary()


class GroupCommunicator:
    """Runs the collectives of one group on CPU tensors, as one of its ranks."""

    def __init__(self, group, name, shared):
        facts, store = group_facts(name), board_store(name)
        native = _native._C.Communicator(group, shared, default_timeout(), facts, store, scripts=True)
        self.native, self.in_memory = native, native.name == "shm"
        self._calls = _native._C.ScriptCalls(native)

    def run(self, verb, given, taken, async_op, op=None, root=-1, splits=((), ())):
        """See csrc/comm/calls/script_calls.h. Returns torch's ``Work`` if ``async_op``, else None at the end of the
        call."""
        op = "sum" if op is None else to_name(op).lower()
        return self._calls.call(verb, given, taken, [list(split or ()) for split in splits], op, root, async_op)


def _over_gloo(group):
    name = str(dist.get_backend(group))
    if name == "gloo":
        return True
    if "gloo" not in name and name != "undefined":
        return False
    return hasattr(group, "_get_backend") and group._get_backend(torch.device("cpu")).name() == "gloo"


def _name_of(group):
    module = dist.distributed_c10d
    names = module._world.pg_names if hasattr(module, "_world") else module._pg_names
    return str(names[group])


def _make(group, shared):
    ours = dist.get_rank(group) >= 0 and _over_gloo(group)
    _known[group] = GroupCommunicator(group, _name_of(group), shared) if ours else None


def add_memory(group):
    """Prepares shared memory for ``group``. All members call this right after they have made the group."""
    if isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) > 1:
        _make(group, shared=os.environ.get("DS_SHM_COLLECTIVES") != "0")


def of(group, tensor, reduces=False):
    """The ``GroupCommunicator`` that runs collectives of ``tensor`` in ``group`` (None: all ranks), or None if torch's
    own functions run them."""
    if tensor is not None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or (reduces and tensor.is_complex()):
            return None
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):  # torch gives another object to ranks that are not members
        return None
    if group not in _known:
        _make(group, shared=False)
    return _known.get(group)


def rank_in(group, rank):
    """The number of global rank ``rank`` in ``group``."""
    return rank if group is None or group is dist.group.WORLD else dist.get_group_rank(group, rank)


def forget(group=None):
    """Drops the communicator of ``group`` (None: of all groups), which is about to be destroyed."""
    if group is None or group is dist.group.WORLD:
        _known.clear()
    elif isinstance(group, dist.ProcessGroup):
        _known.pop(group, None)


def known():
    """All communicators of this process; None stands for a group that torch's own functions serve."""
    return list(_known.values())

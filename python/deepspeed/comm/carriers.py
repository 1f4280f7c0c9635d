"""What carries the collectives of ``deepspeed.comm`` on CPU tensors: a native communicator for each group over gloo.

Groups that ``deepspeed.comm`` makes, the first one included, move tensors through shared memory where their ranks share
a host: such a communicator is made together with the group, not when it is needed, since ranks may come to two groups
in different orders. ``DS_SHM_COLLECTIVES=0`` makes none. All others, and groups of torch's making, go through gloo,
with its gaps filled (csrc/comm/compose.cpp) and calls that do not meet found out (csrc/comm/store_board.h). torch's own
functions, and tensors of other devices, are no business of this module.
"""

import os
import weakref

import torch
import torch.distributed as dist

from deepspeed import _native
from deepspeed.comm.reduce_op import to_name
from deepspeed.comm.timeouts import default_timeout
from deepspeed.comm.watch import board_store, group_facts

# torch's group -> Carrier, or None: torch's own functions carry it. Weak: torch decides when a group ends, and with a
# carrier goes its hold on the job's store.
_known = weakref.WeakKeyDictionary()


class Carrier:
    """The ranks of one group, as this rank calls them."""

    def __init__(self, group, name, shared):
        facts, store = group_facts(name), board_store(name)
        native = _native._C.Communicator(group, shared, default_timeout(), facts, store, scripts=True)
        self.native, self.in_memory = native, native.name == "shm"
        self._calls = _native._C.ScriptCalls(native)

    def run(self, verb, given, taken, async_op, op=None, root=-1, splits=((), ())):
        """csrc/comm/script_calls.h. torch's ``Work`` when ``async_op``, else None when it has ended."""
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
    _known[group] = Carrier(group, _name_of(group), shared) if ours else None


def add_memory(group):
    """All members have just made ``group``: they call this, too."""
    if isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) > 1:
        _make(group, shared=os.environ.get("DS_SHM_COLLECTIVES") != "0")


def of(group, tensor, reduces=False):
    """The ``Carrier`` of ``tensor`` for ``group`` (None: all ranks); None where torch's own functions carry it."""
    if tensor is not None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or (reduces and tensor.is_complex()):
            return None
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):  # what torch gives to those who are no members
        return None
    if group not in _known:
        _make(group, shared=False)
    return _known.get(group)


def place(group, rank):
    """Global ``rank``'s in ``group``."""
    return rank if group is None or group is dist.group.WORLD else dist.get_group_rank(group, rank)


def forget(group=None):
    """``group`` (None: all of them) is about to be destroyed."""
    if group is None or group is dist.group.WORLD:
        _known.clear()
    elif isinstance(group, dist.ProcessGroup):
        _known.pop(group, None)


def known():
    """All of this process."""
    return list(_known.values())

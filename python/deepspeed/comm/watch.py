"""The watches over the groups of this process: stacks for ranks that ask, warnings, the flight recorder.

A rank that waits for another posts what it waits in; when a collective fails, every rank asks all others where they
are, and its error says so. The answers come from threads of the core, which need the interpreter only then.
"""

import atexit
import os
import weakref

import torch.distributed as dist

from deepspeed import _native
from deepspeed.comm.stacks import stack_text
from deepspeed.comm.timed import call_log
from deepspeed.log import logger

_LENGTH = 256  # collectives that flight_record returns
_listeners = weakref.WeakSet()
_watches = []  # of boards in shared memory, and of those in the job's store, which may let a thread wait


def tell_when_asked(listener):
    """Calls ``listener.asked()`` on a thread of the core, while the object lives, when another rank asks for stacks:
    one of its collectives has failed."""
    _listeners.add(listener)


def _stacks():
    for listener in list(_listeners):
        listener.asked()
    return stack_text()


def _the_watches():
    if not _watches:
        for _ in range(2):
            _watches.append(_native._C.Watch(stacks=_stacks, warn=logger.warning))
            # Nobody may ask for the interpreter when it is ending.
            atexit.register(_watches[-1].stop)
    return _watches


def group_facts(name):
    """The ``GroupFacts`` of a native group: its name, this process's rank in the job, the watches and the log."""
    job_rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", -1))
    memory, store = _the_watches()
    return _native._C.GroupFacts(name=name, job_rank=job_rank, watch=memory, store_watch=store, log=call_log)


def board_store(name):
    """The store in which ranks of the group ``name`` (unique in the job) post the calls that they wait in."""
    return dist.PrefixStore(f"deepspeed/where/{name}", dist.distributed_c10d._get_default_store())


def flight_record():
    """The last 256 collectives of this process: through shared memory, by ``deepspeed.comm`` over gloo, by an engine.

    A list of dicts, oldest first: ``group``, ``transport`` (shm, gloo, ...), ``number`` (of the group, from 1), ``op``,
    ``dtype``, ``numel``, ``reduction``, ``root``, ``tag`` (a parameter's name, as a rule), ``call`` (all of that in
    words), ``began`` (seconds since the epoch), ``seconds`` (None while it is under way), ``state`` ("done" or "under
    way"). Each living group keeps its last 256.
    """
    flights = [flight for watch in _watches for flight in watch.flights()]
    return sorted(flights, key=lambda flight: flight["began"])[-_LENGTH:]

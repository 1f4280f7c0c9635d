"""Who looks after the groups of this process: stacks for ranks that ask, warnings, the flight recorder.

A rank that waits for another posts what it waits in; when a collective fails, every rank asks all others where they
are, and its error says so. The answers come from a thread of the core, which needs the interpreter only then.
"""

import atexit
import os

import torch.distributed as dist

from deepspeed import _native
from deepspeed.comm import c10d_watch
from deepspeed.comm.stacks import stack_text
from deepspeed.log import logger

_LENGTH = 256  # collectives that flight_record returns
_watch = None


def _the_watch():
    global _watch
    if _watch is None:
        _watch = _native._C.Watch(stacks=stack_text, warn=logger.warning)
        # Nobody may ask for the interpreter when it is ending.
        atexit.register(_watch.stop)
    return _watch


def group_facts(name):
    """What a native group needs to know to speak for itself: its name, this process's rank in the job, who looks
    after it."""
    if dist.is_initialized():
        job_rank = dist.get_rank()
    else:
        job_rank = int(os.environ.get("RANK", -1))
    return _native._C.GroupFacts(name=name, job_rank=job_rank, watch=_the_watch())


def flight_record():
    """The last 256 collectives of this process through shared memory, or through ``deepspeed.comm`` over gloo.

    A list of dicts, oldest first: ``group``, ``number`` (of the group, from 1), ``op``, ``dtype``, ``numel``,
    ``reduction``, ``root``, ``tag`` (a parameter's name, as a rule), ``began`` (seconds since the epoch), ``seconds``
    (None while it is under way), ``state`` ("done" or "under way"). Each living group keeps its last 256.
    """
    native = [] if _watch is None else _watch.flights()
    return sorted(native + c10d_watch.flights(), key=lambda flight: flight["began"])[-_LENGTH:]

"""Calls of a step, of a run and of a plan, in one form."""

import collections

from deepspeed import _native
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.timed import call_log


def calls_while(take_step):
    """The calls that ``take_step()`` makes."""
    recorder = _native._C.CallRecorder(False)
    call_log.add(recorder)
    try:
        take_step()
        get_accelerator().synchronize()
        return recorder.take()
    finally:
        call_log.remove(recorder)


def _verb(name):
    return name.removesuffix("_into_tensor")  # torch has two names for it


def calls_of(calls):
    """Count and bytes by verb, without the small numbers that only hosts exchange."""
    found = collections.defaultdict(lambda: [0, 0])
    for call in calls:
        op = _verb(call.op)
        found[op][0] += 1
        found[op][1] += call.bytes
    return {op: tuple(figures) for op, figures in found.items()}


def planned_calls(plan, rank=None):
    """The same of the plan's first rank, or of ``rank``."""
    planned, one = {}, plan.ranks[0] if rank is None else next(one for one in plan.ranks if one.rank == rank)
    for (name, _), figures in one.calls.items():
        verb = _verb(name)
        planned[verb] = tuple(map(sum, zip(planned.get(verb, (0, 0)), figures)))
    return planned

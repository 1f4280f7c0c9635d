"""Work that all ranks of a group do: if it fails on one rank, it fails on all."""

from deepspeed.comm.collectives import all_gather_object
from deepspeed.comm.process_group import get_world_size
from deepspeed.comm.timed import suppress_logging


def problems_of_ranks(problem, group=None, alone=False):
    """``[(rank of the group, text)]`` of the ranks with a ``problem``, which is a text or None. All ranks of ``group``
    call it. alone: there are no other ranks."""
    told = [problem]
    if not alone:
        told = [None] * get_world_size(group)
        with suppress_logging():
            all_gather_object(told, problem, group=group)
    return [(rank, text) for rank, text in enumerate(told) if text is not None]


def attempt(function, kinds=Exception):
    """``(the result of function(), None)``, or ``(None, the exception)`` of these kinds: the other ranks hear of it
    before it is raised."""
    try:
        return function(), None
    except kinds as error:
        return None, error


def together(function, what, group=None, alone=False):
    """Calls ``function()`` and returns its result. All ranks of ``group`` must call this. If the function raises on one
    rank, that rank raises its error, and the others raise RuntimeError with that rank, that error and the name
    ``what``.

    alone: whether this is the only rank. function: None if this rank has nothing to do.
    """
    result, error = attempt(function) if function is not None else (None, None)
    problems = problems_of_ranks(None if error is None else f"{type(error).__name__}: {error}", group, alone)
    if error is not None:
        raise error
    for rank, text in problems:
        raise RuntimeError(f"{what} has failed on rank {rank}: {text}")
    return result

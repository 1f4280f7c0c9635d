"""Problems of one rank that all ranks of a group hear of."""

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


def together(function, what, group=None, alone=False):
    """Returns ``function()`` of this rank; all ranks of ``group`` call it. Where it raises on one rank, all of them
    raise: that one its error, the others a RuntimeError which says that ``what`` has failed on that rank, and why.

    alone: there are no other ranks. function: None where this rank has nothing to do.
    """
    result = failed = error = None
    try:
        result = function() if function is not None else None
    except Exception as caught:
        failed, error = f"{type(caught).__name__}: {caught}", caught
    problems = problems_of_ranks(failed, group, alone)
    if error is not None:
        raise error
    for rank, text in problems:
        raise RuntimeError(f"{what} has failed on rank {rank}: {text}")
    return result

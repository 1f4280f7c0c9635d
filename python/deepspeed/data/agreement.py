"""Work that all ranks of a group do, and of which all hear where one fails."""

from deepspeed import comm as dist


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
    if not alone:
        told = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, failed, group=group)
        for rank, text in enumerate(told):
            if text is not None and error is None:
                raise RuntimeError(f"{what} has failed on rank {rank}: {text}")
    if error is not None:
        raise error
    return result

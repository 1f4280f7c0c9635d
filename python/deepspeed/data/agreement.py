"""Work that all ranks of a group do: if it fails on one rank, it fails on all."""

from deepspeed import comm as dist


def together(function, what, group=None, alone=False):
    """Calls ``function()`` and returns its result. All ranks of ``group`` must call this. If the function raises on one
    rank, that rank raises its error, and the others raise RuntimeError with that rank, that error and the name
    ``what``.

    alone: whether this is the only rank. function: None if this rank has nothing to do.
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

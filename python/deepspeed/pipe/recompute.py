"""Groups the layers of a part that its backward computes again together."""

from torch import nn


def segments(calls, interval, names=None):
    """``(first, last + 1, whether it is recomputed)`` of each ``interval`` of ``calls``; 0: of all, which are not.

    names: of classes; only segments of these are. None: segments with a module that has parameters.
    """
    for begin in range(0, len(calls), interval or max(len(calls), 1)):
        end = min(begin + interval, len(calls)) if interval else len(calls)
        yield begin, end, interval > 0 and _is_checkpointable(calls[begin:end], names)


def _is_checkpointable(calls, names):
    if names is not None:
        return all(type(call).__name__ in names for call in calls)
    return any(next(call.parameters(), None) is not None for call in calls if isinstance(call, nn.Module))

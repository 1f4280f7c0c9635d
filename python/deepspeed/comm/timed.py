"""Times communication operations for the log: ours by a decorator, torch.distributed's by standing in for them.

Costs one comparison for each operation while nobody listens.
"""

import contextlib
import functools
import os
import sys
import threading
import time

import torch
import torch.distributed

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.utils import argument_names, get_debug_log_name, size_of_arguments

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# torch.distributed's functions that are stood in for, under the names they are recorded as. Not isend and irecv: torch
# compares functions that it is given with its own.
RAW = {
    "all_reduce": "all_reduce", "reduce": "reduce", "broadcast": "broadcast", "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather_into_tensor", "_all_gather_base": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor", "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all_single", "gather": "gather", "scatter": "scatter", "send": "send", "recv": "recv",
    "barrier": "barrier", "all_gather_object": "all_gather_object", "broadcast_object_list": "broadcast_object_list",
}  # fmt: skip
_UNFINISHED = ("isend", "irecv")  # whose end may need what the caller does next

_listener = None
_replaced = {}
_here = threading.local()


def listen(comms_logger):
    """Operations go to ``comms_logger`` from now on; None: to nobody. ``DS_COMMS_LOGGER_RAW=0`` leaves
    torch.distributed's own functions alone."""
    global _listener
    _listener = comms_logger
    for name, function in _replaced.items():
        setattr(torch.distributed, name, function)
    _replaced.clear()
    if comms_logger is not None and os.environ.get("DS_COMMS_LOGGER_RAW", "1") != "0":
        for name, known_as in RAW.items():
            function = getattr(torch.distributed, name, None)
            if function is not None:
                _replaced[name] = function
                setattr(torch.distributed, name, _timed(function, known_as))


@contextlib.contextmanager
def suppress_logging():
    """Operations inside, on this thread, are not recorded: they belong to one that is, or to the log itself."""
    before = getattr(_here, "inside", False)
    _here.inside = True
    try:
        yield
    finally:
        _here.inside = before


def timed_op(func):
    """Decorates an operation so that it is timed while the log listens."""
    return _timed(func, func.__name__)


def _timed(func, name):
    @functools.wraps(func)
    def operation(*args, **kwargs):
        if _listener is None or getattr(_here, "inside", False):
            return func(*args, **kwargs)
        with suppress_logging():
            return _recorded(func, name, args, kwargs)

    return operation


def _recorded(func, name, args, kwargs):
    listener, given = _listener, argument_names(func, args, kwargs)
    log_name = given.get("log_name", name)
    ranks = torch.distributed.get_world_size(given.get("group")) if torch.distributed.is_initialized() else 1
    if ranks < 1 or not listener.wants(log_name, given.get("prof", False)):
        return func(*args, **kwargs)
    size = size_of_arguments(given)
    caller = kwargs.get("debug") or (_caller() if listener.debug else None)
    record_name = get_debug_log_name({"log_name": log_name, "debug": caller}, listener.debug)
    accelerator = get_accelerator()
    waits = not accelerator.is_synchronized_device()
    if waits:
        accelerator.synchronize()
    begin = time.perf_counter()
    result = func(*args, **kwargs)

    def end():
        if waits:
            accelerator.synchronize()
        listener.add(name, record_name, (time.perf_counter() - begin) * 1e3, size, ranks)

    if not hasattr(result, "wait"):
        end()
        return result
    work = _TimedWork(result, end)
    if name not in _UNFINISHED:
        work.wait()
    return work


def _caller():
    """The name of the function outside of this package that called the operation."""
    frame = sys._getframe(1)
    while frame is not None and os.path.dirname(frame.f_code.co_filename) == _PACKAGE:
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else "unknown"


class _TimedWork:
    """A handle whose first ``wait`` is the end of the operation; more of them return at once, which gloo's own do not
    for a receive. Everything else is the handle's."""

    def __init__(self, work, end):
        self._work = work
        self._end = end

    def wait(self, *args, **kwargs):
        if self._end is not None:
            self._work.wait(*args, **kwargs)
            end, self._end = self._end, None
            end()
        return True

    def __getattr__(self, name):
        return getattr(self._work, name)

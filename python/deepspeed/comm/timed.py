"""Names and measures the operations of ``deepspeed.comm`` for the log of operations.

The log is native (csrc/comm/decorators/call_log.h). Native communicators write into it, and so do observers of
``torch.distributed``'s operators; an operation of ``deepspeed.comm`` is one entry, whatever it is made of. Costs one
comparison for each operation while nobody listens.
"""

import contextlib
import functools
import os
import sys
import time

import torch.distributed

from deepspeed import _native
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.utils import argument_names, get_debug_log_name, size_of_arguments

_SKIPPED = tuple(os.path.dirname(os.path.abspath(file)) for file in (__file__, torch.distributed.__file__))
_UNFINISHED = ("isend", "irecv")  # whose end may need what the caller does next

call_log = _native._C.CallLog()
_listener = None
_torch_calls = None  # the observer of torch.distributed, while it is wanted


def listen(comms_logger, torch_calls=True):
    """Operations are logged for ``comms_logger`` from now on; None: not at all. ``torch_calls``: those that scripts
    make through torch.distributed, too."""
    global _listener, _torch_calls
    _listener, _torch_calls = comms_logger, None
    call_log.turn(comms_logger is not None, caller_name)
    if comms_logger is not None and torch_calls:
        _torch_calls = _native._C.TorchCalls(call_log)


@contextlib.contextmanager
def suppress_logging():
    """Operations inside, on this thread, are not recorded: they belong to one that is, or to the log itself."""
    call_log.enter()
    try:
        yield
    finally:
        call_log.leave()


def timed_op(func):
    """Decorates an operation so that it is timed while the log listens."""

    @functools.wraps(func)
    def operation(*args, **kwargs):
        if not call_log.on:
            return func(*args, **kwargs)
        outermost = call_log.enter()
        try:
            return _recorded(func, args, kwargs) if outermost else func(*args, **kwargs)
        finally:
            call_log.leave()

    return operation


def _recorded(func, args, kwargs):
    listener, name, given = _listener, func.__name__, argument_names(func, args, kwargs)
    log_name = given.get("log_name", name)
    ranks = torch.distributed.get_world_size(given.get("group")) if torch.distributed.is_initialized() else 1
    if ranks < 1 or not listener.wants(log_name, given.get("prof", False)):
        return func(*args, **kwargs)
    size = size_of_arguments(given)
    caller = kwargs.get("debug") or (caller_name() if listener.debug else None)
    label = get_debug_log_name({"log_name": log_name, "debug": caller}, listener.debug)
    accelerator = get_accelerator()
    waits = not accelerator.is_synchronized_device()
    if waits:
        accelerator.synchronize()
    begin = time.perf_counter()
    result = func(*args, **kwargs)

    def end():
        if waits:
            accelerator.synchronize()
        call_log.add(name, label, size, (time.perf_counter() - begin) * 1e3, ranks)
        listener.collect()

    if not hasattr(result, "wait"):
        end()
        return result
    work = _TimedWork(result, end)
    if name not in _UNFINISHED:
        work.wait()
    return work


def caller_name():
    """The name of the function outside of this package and of torch.distributed that called the operation; "unknown" in
    a thread that runs no Python."""
    frame = sys._getframe(0)
    while frame is not None and os.path.dirname(frame.f_code.co_filename) in _SKIPPED:
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else "unknown"


class _TimedWork:
    """A handle whose first ``wait`` is the end of the operation; more of them return at once, which gloo's own do not
    for a receive. Everything else is the handle's."""

    def __init__(self, work, end):
        self._work, self._end = work, end

    def wait(self, *args, **kwargs):
        if self._end is not None:
            self._work.wait(*args, **kwargs)
            end, self._end = self._end, None
            end()
        return True

    def __getattr__(self, name):
        return getattr(self._work, name)

"""Names and measures the operations of ``deepspeed.comm`` for the log of operations.

The log is native (csrc/comm/decorators/call_log.h), and has any number of listeners, who come and go in any order.
Native communicators write into it, and so do observers of ``torch.distributed``'s operators; an operation of
``deepspeed.comm`` is one entry, whatever it is made of. Costs one comparison for each operation while nobody records.
"""

import collections
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
_MESSAGES = (*_UNFINISHED, "send", "recv")

call_log = _native._C.CallLog()


class _Listening:
    """The listeners to the calls of this process."""

    def __init__(self):
        self.recorders = {}  # -> whether they want the calls of torch.distributed, too
        self.logger = None  # the comms logger while it listens: it says which operations it wants, and as what
        self.torch_calls = None  # the observer of torch.distributed, while somebody wants it
        self.numbers = collections.Counter()  # of the collectives of a group, since somebody began to record


_listening = _Listening()


def listen(recorder, torch_calls=True, logger=None):
    """Operations are recorded by ``recorder``, a native ``CallRecorder``, from now on. ``torch_calls``: those that
    scripts make through torch.distributed, too. ``logger``: what names and chooses them, ``CommsLogger``."""
    _listening.recorders[recorder] = torch_calls
    _listening.logger = logger or _listening.logger
    if torch_calls and _listening.torch_calls is None:
        _listening.torch_calls = _native._C.TorchCalls(call_log, _numbered)
    call_log.add(recorder)


def stop_listening(recorder, logger=None):
    """``recorder`` gets no more operations. One that does not listen: nothing happens."""
    call_log.remove(recorder)
    _listening.recorders.pop(recorder, None)
    if _listening.logger is logger:
        _listening.logger = None
    if not any(_listening.recorders.values()):
        _listening.torch_calls = None
    if not _listening.recorders:
        _listening.numbers.clear()


def listen_alone(recorder):
    """``recorder`` gets the operations of native communicators and of ``deepspeed.comm``, and nobody else gets any."""
    for one in list(_listening.recorders):
        stop_listening(one, _listening.logger)
    call_log.add(recorder)


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
        return logged(func, args, kwargs, functools.partial(func, *args, **kwargs))

    return operation


def logged(func, args, kwargs, call):
    """Returns the result of ``call()``, which is timed while the log listens. ``func(*args, **kwargs)`` describes
    it."""
    if not call_log.records:
        return call()
    outermost = call_log.enter()
    try:
        return _recorded(func, args, kwargs, call) if outermost else call()
    finally:
        call_log.leave()


def _recorded(func, args, kwargs, call):
    name, given = func.__name__, argument_names(func, args, kwargs)
    group = given.get("group")
    ranks = torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1
    if ranks < 1:
        return call()
    logger, log_name, label = _listening.logger, given.get("log_name", name), ""
    wanted = logger is not None and logger.wants(log_name, given.get("prof", False))
    if wanted:
        caller = kwargs.get("debug") or (caller_name() if logger.debug else None)
        label = get_debug_log_name({"log_name": log_name, "debug": caller}, logger.debug)
    elif call_log.waits and len(_listening.recorders) == 1:  # nobody else records
        return call()
    size = size_of_arguments(given)
    group_name, number = (_name_of(group), -1) if name in _MESSAGES else _numbered(group)
    accelerator = get_accelerator()
    waits = wanted and not accelerator.is_synchronized_device()
    if waits:
        accelerator.synchronize()
    begin = time.perf_counter()
    result = call()
    issued = time.perf_counter() - begin

    def end(blocked=0.0):
        if waits:
            accelerator.synchronize()
        call_log.ended(name, label, size, ranks, group_name, number, begin, issued + blocked, waited=wanted)
        if wanted:
            logger.collect()

    if not hasattr(result, "wait"):
        end()
        return result
    work = _TimedWork(result, end)
    if wanted and name not in _UNFINISHED:
        work.wait()
    return work


def _numbered(group):
    """The name of torch's ``group``, and the number of a collective that begins on it: the same on all its ranks."""
    name = _name_of(group)
    number, _listening.numbers[name] = _listening.numbers[name], _listening.numbers[name] + 1
    return name, number


def _name_of(group):
    """The name of torch's ``group``, which is the same on all its ranks; "" without one."""
    module = torch.distributed.distributed_c10d
    names = module._world.pg_names if hasattr(module, "_world") else module._pg_names
    group = torch.distributed.group.WORLD if group is None else group
    return str(names.get(group, ""))


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
            begin = time.perf_counter()
            self._work.wait(*args, **kwargs)
            end, self._end = self._end, None
            end(time.perf_counter() - begin)
        return True

    def __getattr__(self, name):
        return getattr(self._work, name)

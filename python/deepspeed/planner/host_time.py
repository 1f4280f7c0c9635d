"""The time of the host in a planned step: of the program, of torch and of the engine, between two operators."""

import os
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.profiling.peak import measured_once
from deepspeed.utils.fused_attention import FusedAttention

_CALLS, _TRIES = 100, 5


class HostTime:
    """Gives ``clock``, a ``StepPlan``, the processor time of this thread between the operators of a planned step.
    ``machine``: where the step will run; its host takes ``machine.host_ns`` for what takes ``host_ns()`` here. The
    ``ranks`` of a host that compute on its processor share its cores, of which there are as many as here. A mode of
    Python sees each operator of a plan and of no run, so the time to get there does not count."""

    def __init__(self, clock, machine, ranks=1):
        self.clock, self.on, self._left = clock, False, 0
        self._scale = machine.host_ns / host_ns() if machine.host_ns else 0.0
        if machine.synchronous:
            self._scale *= max(1.0, ranks / len(os.sched_getaffinity(0)))
        self._mode_ns = _mode_ns() if machine.host_ns else 0

    def turn(self, on):
        self.on = on and self._scale > 0
        self.ends()

    def begins(self):
        """An operator is in the mode of the plan: the time before it counts."""
        self._add(self._mode_ns)

    def pause(self):
        """The time up to now counts."""
        self._add(0)
        self.ends()

    def ends(self):
        """The time from the last call of another method to now does not count."""
        self._left = time.thread_time_ns()

    def _add(self, without):
        if self.on:
            now = time.thread_time_ns()
            self.clock.host(int(self._scale * max(0, now - self._left - without)))
            self._left = now


class _Seen(TorchDispatchMode):
    """A mode that measures itself as ``HostTime`` measures the mode of a plan."""

    def __init__(self):
        super().__init__()
        self.outside, self._left = 0, time.thread_time_ns()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.outside += time.thread_time_ns() - self._left
        out = func(*args, **(kwargs or {}))
        self._left = time.thread_time_ns()
        return out


def _mode_ns():
    """Nanoseconds of this thread until a mode of Python has an operator, and after it."""
    one, found = torch.empty(4, 4, device="meta", requires_grad=True), []
    for _ in range(_TRIES):
        with FusedAttention(), _Seen() as seen:
            _views(one)
        begin = time.thread_time_ns()
        _views(one)
        found.append((seen.outside - (time.thread_time_ns() - begin)) / _CALLS)
    return max(0, min(found))


def _views(one):
    for _ in range(_CALLS):
        one.view(2, 8)


def host_ns():
    """Nanoseconds that the host takes for the call of a small layer, measured once on each machine."""
    return measured_once("hosts", f"{torch.__version__}", _layer_ns)


def _layer_ns():
    layer, one = torch.nn.Linear(4, 4), torch.ones(4, 4)
    found = []
    for _ in range(_TRIES):
        begin = time.thread_time_ns()
        for _ in range(_CALLS):
            layer(one)
        found.append((time.thread_time_ns() - begin) / _CALLS)
    return min(found)

"""The phases that the wall time of a training step is divided into, as csrc/base/step_clock.h has them."""

import contextlib

from deepspeed import _native

_COUNTED = _native._C.PHASES
PHASES = tuple(name for name in _COUNTED if name != "reduction")  # which users see as communication


class Phases:
    """The phases of an engine as they begin and end. It knows no engine, so that loaders may have it."""

    def __init__(self):
        self.clock = _native._C.StepClock()
        self.waits = None  # a native StepWaits, which learns of messages of pipelines here
        self.listeners = []  # objects with ``begin_phase(name)`` and ``end_phase(name)``

    def enter(self, name):
        """Returns what ``leave`` wants."""
        for one in self.listeners:
            one.begin_phase(name)
        if name == "communication" and self.waits is not None:
            self.waits.begin()
        return name, self.clock.enter(name)

    def leave(self, entered):
        name, mark = entered
        self.clock.leave(mark)
        if name == "communication" and self.waits is not None:
            self.waits.end()
        for one in self.listeners:
            one.end_phase(name)

    @contextlib.contextmanager
    def inside(self, name):
        mark = self.enter(name)
        try:
            yield
        finally:
            self.leave(mark)


class PhaseTimes:
    """Seconds by phase since the last question, or since the object was made."""

    def __init__(self, clock):
        self._clock, self._before = clock, clock.totals()

    def take(self):
        """``(wall, {phase: seconds}, seconds in which backward waited for reductions)``."""
        before, self._before = self._before, self._clock.totals()
        spent, reduced = (
            {name: (now - then) / 1e9 for name, now, then in zip(_COUNTED, *pair, strict=True)}
            for pair in zip(self._before[1:3], before[1:3], strict=True)
        )
        spent["communication"] += spent["reduction"]
        return (self._before[0] - before[0]) / 1e9, {name: spent[name] for name in PHASES}, reduced["reduction"]

"""The phases that the wall time of a training step is divided into."""

import contextlib

from deepspeed import _native

PHASES = ("data", "forward", "backward", "communication", "gathers", "optimizer", "offload", "checkpoint", "rest")
# In the order of csrc/base/step_clock.h.
_ORDER = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "checkpoint",
    "communication",
    "reduction",
    "gathers",
    "offload",
    "rest",
)
_NUMBERS = {name: number for number, name in enumerate(_ORDER)}


class Phases:
    """The phases of an engine as they begin and end. It knows no engine, so that loaders may have it."""

    def __init__(self):
        self.clock = _native._C.StepClock()
        self.listeners = []  # objects with ``begin_phase(name)`` and ``end_phase(name)``

    def enter(self, name):
        """Returns what ``leave`` wants."""
        for one in self.listeners:
            one.begin_phase(name)
        return name, self.clock.enter(_NUMBERS[name])

    def leave(self, entered):
        name, mark = entered
        self.clock.leave(mark)
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
            {name: (now - then) / 1e9 for name, now, then in zip(_ORDER, *pair, strict=True)}
            for pair in zip(self._before[1:], before[1:], strict=True)
        )
        spent["communication"] += spent["reduction"]
        return (self._before[0] - before[0]) / 1e9, {name: spent[name] for name in PHASES}, reduced["reduction"]

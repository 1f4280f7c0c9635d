"""A registry: names of one kind of thing (accelerators, monitors, ...), found without importing what is not used.

An entry is a name, a target ``"module:attribute"`` that is imported on first use, a probe that says whether it can
work here, and a priority for the choice by detection. Other packages join through an entry-point group: they declare
``[project.entry-points."<group>"]  name = "their.module:Attribute"``. Imports no torch.
"""

import importlib
import importlib.util
import sys
from collections import namedtuple
from functools import partial


class UnknownNameError(ValueError):
    """A name that no entry has; the text lists the names there are and the nearest one."""


class Entry(namedtuple("Entry", "name target probe priority", defaults=(None, 0))):
    """``probe`` returns True, or False, or a text that says why not; ``"module:function"`` is imported to be asked."""

    __slots__ = ()


def load_target(target):
    """Imports ``"module:attribute"`` (dots in the attribute are followed) and returns the object."""
    module_name, _, path = target.partition(":")
    if not path:
        raise ValueError(f"{target!r} is not a target: write it as 'package.module:attribute'.")
    found = importlib.import_module(module_name)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def lazy_package(package, where=None, otherwise=None):
    """``(__getattr__, __dir__)`` of a package whose public names are imported when they are first used.

    Every file and folder of the package answers to its name, too: after ``import deepspeed`` alone, clients write
    ``deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES``.

    Args:
        package: its ``__name__``. where: {public name: module that has it}; these go before submodules.
        otherwise: called with a name that is none of these; its AttributeError is the answer if it has none either.
    """
    where = where or {}

    def get(name):
        if name in where:
            value = getattr(importlib.import_module(where[name]), name)
            vars(sys.modules[package])[name] = value
            return value
        path = f"{package}.{name}"
        if not name.startswith("_") and importlib.util.find_spec(path) is not None:
            return importlib.import_module(path)
        if otherwise is not None and not name.startswith("__"):
            return otherwise(name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names():
        return sorted({*vars(sys.modules[package]), *where})

    return get, names


def nearest(name, known):
    """``" Did you mean 'x'?"`` with the known name that is spelled most like ``name``, or an empty text."""
    # Imported when used, as importlib.metadata below: each start of the launcher would pay for them.
    difflib = importlib.import_module("difflib")
    close = difflib.get_close_matches(str(name).lower(), [str(one) for one in known], n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


class Registry:
    """Entries of one kind. ``kind`` is the noun for error texts, ``group`` the entry-point group for plug-ins."""

    def __init__(self, kind, group=None):
        self.kind = kind
        self.group = group
        self._entries = {}
        self._plugins_read = group is None

    def register(self, name, target, probe=None, priority=0):
        """Adds an entry; ValueError for a name that is taken, so that no plug-in replaces a part silently."""
        if name in self._entries:
            raise ValueError(
                f"the {self.kind} {name!r} is registered already, as {self._entries[name].target!r}. "
                f"Choose another name for {target!r}."
            )
        self._entries[name] = Entry(name, target, probe, priority)

    def names(self):
        """All names, plug-ins included, sorted."""
        self._read_plugins()
        return sorted(self._entries)

    def get(self, name):
        """The object behind ``name``, imported now if it was not; UnknownNameError for a name nobody registered."""
        return load_target(self.entry(name).target)

    def entry(self, name):
        """The ``Entry`` of ``name`` without importing its target."""
        if name not in self._entries:
            self._read_plugins()
        if name not in self._entries:
            known = self.names()
            raise UnknownNameError(
                f"there is no {self.kind} named {name!r}; known are: {', '.join(known) or 'none'}."
                f"{nearest(name, known)}"
            )
        return self._entries[name]

    def why_not(self, name):
        """An empty text when the entry can work on this machine, else the reason why it cannot."""
        probe = self.entry(name).probe
        if probe is None:
            return ""
        try:
            answer = (load_target(probe) if isinstance(probe, str) else probe)()
        except Exception as error:  # a plug-in's probe may fail in any way; that means "not here", never a crash
            return f"{type(error).__name__}: {error}"
        return answer if isinstance(answer, str) else "" if answer else "not available on this machine"

    def detect(self):
        """The name of highest priority that can work here (ties: first by name), or None."""
        return next((name for name in self.in_order() if not self.why_not(name)), None)

    def in_order(self):
        """All names, in the order in which ``detect`` tries them."""
        return sorted(self.names(), key=lambda name: (-self._entries[name].priority, name))

    def _read_plugins(self):
        if self._plugins_read:
            return
        self._plugins_read = True
        for point in importlib.import_module("importlib.metadata").entry_points(group=self.group):
            if point.name in self._entries:
                continue  # our own parts are declared in code; an installed copy must not shadow the tree in use
            self._entries[point.name] = Entry(point.name, point.value, partial(_probe_plugin, point), priority=100)


def _probe_plugin(point):
    # A plug-in may offer `probe()` beside its target; without one, that its module can be imported is the answer.
    probe = getattr(importlib.import_module(point.module), "probe", None)
    return probe() if callable(probe) else True

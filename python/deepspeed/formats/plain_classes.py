"""The classes of this process that a checkpoint's pickle may name; their instances are made without running their code.

The plain types of Python, tensors and arrays are in the table of ``csrc/formats``. A class that this process has
imported and that is data and nothing else is let through as well. Nothing is ever imported because a file says so.
"""

import _compat_pickle
import abc
import argparse
import collections
import dataclasses
import enum
import importlib
import sys
import types

import torch

from deepspeed.formats.standalone_reader import RefusedClass

try:
    import numpy
except ImportError:  # torch runs without it
    numpy = None

# Methods by which a class could have its say while its instances are made, freed or written again.
_OWN_CODE = ("__reduce__", "__reduce_ex__", "__setstate__", "__post_init__", "__del__", "__getattribute__",
             "__getnewargs__", "__getnewargs_ex__", "__getstate__", "__copy__", "__deepcopy__")  # fmt: skip
_LIBRARY = ("builtins", "collections", "typing", "abc")
_CONTAINERS = (dict, list, tuple, set, frozenset, str, int, float, bytes)
_WITH_ATTRIBUTES = (argparse.Namespace, collections.Counter, collections.OrderedDict, types.SimpleNamespace)
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
# (module in files, module here) -> DeepSpeed's own classes that files name.
_PUBLISHED = {
    ("deepspeed.runtime.zero.config", "deepspeed.config.sections"): ("ZeroStageEnum",),
    ("deepspeed.runtime.zero.offload_config", "deepspeed.config.sections"): (
        "OffloadDeviceEnum",
        "OffloadStateTypeEnum",
    ),
    ("deepspeed.utils.types", None): ("ActivationFuncType",),
    ("deepspeed.runtime.fp16.loss_scaler", "deepspeed.optim.loss_scaler"): ("LossScaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", None): ("fragment_address",),
    ("deepspeed.checkpoint.universal_checkpoint", None): ("SubparamShape",),
}


def need(condition, what):
    """ValueError with ``what`` unless the condition holds."""
    if not condition:
        raise ValueError(what)


def is_plain_data(cls):
    """Whether ``cls`` is an enum, a dataclass, or a subclass of a built-in container, of str or of a number, and none
    of its methods takes part in making, freeing or writing an instance."""
    if type(cls) not in (type, abc.ABCMeta, enum.EnumMeta):
        return False
    if issubclass(cls, enum.Enum):
        return "_missing_" not in {name for base in cls.__mro__ if base.__module__ != "enum" for name in vars(base)}
    own = [base for base in cls.__mro__ if base.__module__ not in _LIBRARY]
    if any(name in vars(base) and not _generated(base, name) for base in own for name in _OWN_CODE):
        return False
    if issubclass(cls, (*_CONTAINERS, collections.deque)):
        return True
    init = vars(cls).get("__init__")
    return dataclasses.is_dataclass(cls) and getattr(getattr(init, "__code__", None), "co_filename", "") == "<string>"


def _generated(base, name):
    """Named tuples, generics and dataclasses come with some of these from the standard library."""
    return name == "__getnewargs__" and hasattr(base, "_fields") or getattr(vars(base)[name], "__module__", None) in (
        "collections", "dataclasses", "typing",
    )  # fmt: skip


def _published_class(module, name):
    """A class of DeepSpeed by the import path that files name, or None."""
    paths = (path for (path, room), names in _PUBLISHED.items() if name in names and module in (path, room))
    path = next(paths, None)
    return None if path is None else getattr(importlib.import_module(path), name)


def _resolve(module, name):
    """The object of a dotted name, without asking a module's __getattr__; None if there is none."""
    found = module
    for part in name.split("."):
        try:
            found = vars(found).get(part)
        except TypeError:
            return None
    return found


class Names:
    """The names of one file beyond the table, and what is done with their instances.

    allow: classes, functions or "module.name" that may do as they please. states: {class: function(value, state)}.
    """

    def __init__(self, path, allow, states):
        self.path, self._states = path, states
        self._allowed_names = {name for name in allow if isinstance(name, str)}
        self._allowed = [value for value in allow if not isinstance(value, str)]
        self.asks_first = bool(self._allowed_names or self._allowed)  # before the table

    def find(self, module, name, in_table):
        """(value, use, is an enum, whether hashing runs no code, whether it is freed recursively); use is "trusted",
        "plain" or "value". None for a name that is the table's. RefusedClass for what is not let through."""
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        if full in self._allowed_names:
            self._allowed.append(_resolve(importlib.import_module(module), name))
            self._allowed_names.discard(full)
            return self._allowed[-1], "trusted", False, *_facts(self._allowed[-1])
        for value in self._allowed:
            if full == f"{value.__module__}.{value.__qualname__}":
                return value, "trusted", False, *_facts(value)
        if in_table:
            return None
        known = getattr(torch, name, None) if module == "torch" else None
        if isinstance(known, _CONSTANTS):
            return known, "value", False, True, False
        if module == "numpy" and numpy is not None:
            known = vars(numpy).get(name)
            if isinstance(known, type) and issubclass(known, numpy.generic) and known is not numpy.object_:
                return known, "value", False, True, False
        found = _published_class(module, name)
        if found is None:
            found = _resolve(sys.modules.get(module), name)
            found = found if isinstance(found, type) and is_plain_data(found) else None
        if found is None:
            raise RefusedClass(full, self.path)
        return found, "plain", issubclass(found, enum.Enum), *_facts(found)

    def refused(self, name):
        return RefusedClass(name, self.path)

    def make(self, cls, arguments):
        """An instance of plain data: what the base class makes of the arguments; ``__init__`` does not run."""
        if issubclass(cls, enum.Enum):
            return member_of(cls, *arguments)
        return _bare_instance(cls, arguments)

    # ---- what is put into them ---------------------------------------------------------------------------------------
    def _trusts(self, value):
        return any(type(value) is allowed for allowed in self._allowed)

    def extend(self, target, items):
        if isinstance(target, list):
            list.extend(target, items)
        elif isinstance(target, collections.deque):
            collections.deque.extend(target, items)
        elif self._trusts(target):
            for item in items:
                target.append(item)
        else:
            raise TypeError(f"items for a {type(target).__name__}")

    def set_items(self, target, items):
        put = next((base.__setitem__ for base in (collections.OrderedDict, dict) if isinstance(target, base)), None)
        if put is None and self._trusts(target):
            put = type(target).__setitem__
        if put is None:
            raise TypeError(f"keys for a {type(target).__name__}")
        for at in range(0, len(items), 2):
            put(target, items[at], items[at + 1])

    def add_items(self, target, items):
        for item in items:
            set.add(target, item)

    def build(self, value, state):
        """Gives ``value`` its state: attributes, never through the class's own code."""
        trusted = self._trusts(value)
        rule = next((rule for known, rule in self._states.items() if type(value) is known and not trusted), None)
        if rule is not None:
            return rule(value, state)
        if trusted and hasattr(value, "__setstate__"):
            return value.__setstate__(state)
        attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
        for name, item in (*(attributes or {}).items(), *(slots or {}).items()):
            if trusted:
                setattr(value, name, item)
            else:
                _check_attribute(type(value), name)
                object.__setattr__(value, name, item)
        return None


def _facts(cls):
    if not isinstance(cls, type):
        return False, False
    unhashed = cls.__hash__ is None or type(cls.__hash__).__name__ == "wrapper_descriptor"
    return unhashed, issubclass(cls, (collections.deque, collections.defaultdict))


def _check_attribute(cls, name):
    """Attributes must not stand in for methods: other code would call them."""
    need(type(name) is str and not (name.startswith("__") and name.endswith("__")), f"an attribute {name!r}")
    found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    own_slot = isinstance(found, types.MemberDescriptorType) and found.__objclass__.__module__ not in _LIBRARY
    need(own_slot or not (callable(found) or hasattr(found, "__get__")), f"an attribute {name!r} over a method")


def member_of(cls, *arguments):
    """The member of an enum with this value. ValueError without one."""
    need(len(arguments) == 1, f"{cls.__name__} of several values")
    for member in cls.__members__.values():
        if type(member._value_) is type(arguments[0]) and member._value_ == arguments[0]:
            return member
    raise ValueError(f"{cls.__name__} has no member of the value {arguments[0]!r}")


def _bare_instance(cls, arguments):
    for base in (collections.OrderedDict, collections.defaultdict, dict, collections.deque, list, set):
        if issubclass(cls, base):
            need(not arguments or base is not dict and base is not set, f"arguments for {cls.__name__}")
            made = base.__new__(cls)
            if arguments:
                need(base is list and type(arguments[0]) is list, f"arguments for {cls.__name__}")
                list.extend(made, arguments[0])
            return made
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        need(len(arguments) == len(cls._fields), f"arguments for {cls.__name__}")
        return tuple.__new__(cls, arguments)
    for base, kinds in ((tuple, (list, tuple)), (frozenset, (list, tuple, set, frozenset)), (str, str), (bytes, bytes),
                        (int, int), (float, (int, float))):  # fmt: skip
        if issubclass(cls, base):
            need(len(arguments) <= 1 and all(isinstance(a, kinds) for a in arguments), f"arguments for {cls.__name__}")
            # These would be hashed, and what is in them.
            deep = base is frozenset and any(isinstance(i, (tuple, frozenset)) for a in arguments for i in a)
            need(not deep, f"parts of parts in {cls.__name__}")
            return base.__new__(cls, *arguments)
    need(not arguments, f"arguments for {cls.__name__}")
    return object.__new__(cls)

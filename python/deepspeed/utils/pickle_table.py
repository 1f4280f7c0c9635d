"""What a checkpoint's pickle may name, and what is done when it does: plain types of Python. Tensors and arrays are in
``deepspeed.utils.pickle_tensors``.

A rule of the table gets arguments from the file and checks each of them. A class that this process has imported and
that is data and nothing else is let through as well: its instances are filled without running any of its code. Nothing
is ever imported because a file says so.
"""

import _compat_pickle
import abc
import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import importlib
import pathlib
import re
import sys
import types
import uuid

from deepspeed.utils.pickle_machine import RefusedClass, check_key

_FACTORIES = (None, bool, collections.Counter, collections.OrderedDict, collections.deque, dict, float, int, list, set,
              str, tuple)  # fmt: skip
_PLAIN = (bool, bytes, complex, float, int, str, type(None))
_LONGEST_RANGE = 1 << 62
_OLD_NAMES = {
    ("__builtin__", "unicode"): ("builtins", "str"),
    ("__builtin__", "long"): ("builtins", "int"),
    ("__builtin__", "xrange"): ("builtins", "range"),
    ("copy_reg", "_reconstructor"): ("copyreg", "_reconstructor"),
    ("pathlib._local", "PosixPath"): ("pathlib", "PosixPath"),
    ("pathlib._local", "PurePosixPath"): ("pathlib", "PurePosixPath"),
    ("pathlib._local", "WindowsPath"): ("pathlib", "WindowsPath"),
    ("pathlib._local", "PureWindowsPath"): ("pathlib", "PureWindowsPath"),
}
# Methods by which a class could have its say while its instances are made, freed or written again.
_OWN_CODE = ("__reduce__", "__reduce_ex__", "__setstate__", "__post_init__", "__del__", "__getattribute__",
             "__getnewargs__", "__getnewargs_ex__", "__getstate__", "__copy__", "__deepcopy__")  # fmt: skip
_LIBRARY = ("builtins", "collections", "typing", "abc")
_WITH_ATTRIBUTES = (argparse.Namespace, collections.Counter, collections.OrderedDict, types.SimpleNamespace)
_CONTAINERS = (dict, list, tuple, set, frozenset, str, int, float, bytes)


RECORD = "record"  # instead of a rule: instances are made bare and get attributes


class Word:
    """A name whose only use is to be called, as a rule; the function itself is never in reach of the file."""

    def __init__(self, name):
        self.name = name


def need(condition, what):
    """ValueError with ``what`` unless the condition holds."""
    if not condition:
        raise ValueError(what)


def _all_of(kinds, arguments, what):
    need(all(type(a) in kinds or isinstance(a, kinds) for a in arguments), f"{what} of something else")


def _keys(items):
    for item in items:
        check_key(item)
    return items


def _sequence(cls):
    def make(*arguments):
        need(len(arguments) < 2, f"{cls.__name__} of several things")
        _all_of((list, tuple, set, frozenset, dict, range), arguments, cls.__name__)
        items = arguments[0] if arguments else ()
        need(not isinstance(items, range), f"{cls.__name__} of a range")
        return cls(_keys(items)) if cls in (set, frozenset) else cls(items)

    return make


def _number(cls):
    def make(*arguments):
        _all_of((bool, int, float, complex) if cls is complex else (bool, int, float), arguments, cls.__name__)
        return cls(*arguments)

    return make


def _text(*arguments):
    need(not arguments or type(arguments[0]) is str and len(arguments) == 1, "str of something else")
    return str(*arguments)


def _raw(cls):
    def make(*arguments):
        if len(arguments) == 2 and type(arguments[0]) is str and arguments[1] in ("latin-1", "latin1"):
            return cls(arguments[0].encode("latin-1"))
        need(not arguments or len(arguments) == 1 and type(arguments[0]) in (bytes, bytearray, list), cls.__name__)
        return cls(*arguments)

    return make


def _range(*arguments):
    _all_of((int,), arguments, "range")
    need(all(abs(a) < _LONGEST_RANGE for a in arguments), "range of huge numbers")
    return range(*arguments)


def _slice(*arguments):
    _all_of((int, type(None)), arguments, "slice")
    return slice(*arguments)


def _mapping(cls):
    def make(*arguments):
        made = cls()
        need(len(arguments) < 2, f"{cls.__name__} of several things")
        for source in arguments:
            need(isinstance(source, (dict, list, tuple)), f"{cls.__name__} of something else")
            for key, value in list(source.items() if isinstance(source, dict) else source):
                check_key(key)
                cls.__setitem__(made, key, value)
        return made

    return make


def _defaultdict(factory=None, *arguments):
    need(any(factory is known for known in _FACTORIES), f"defaultdict of {factory!r}")
    made = _mapping(dict)(*arguments)
    return collections.defaultdict(factory, made)


def _deque(items=(), maxlen=None):
    need(isinstance(items, (list, tuple)) and (maxlen is None or type(maxlen) is int), "deque of something else")
    return collections.deque(items, maxlen)


def _of_plain(cls, *more):
    def make(*arguments):
        _all_of((*_PLAIN, *more), arguments, cls.__name__)
        return cls(*arguments)

    return make


def _decimal(*arguments):
    _all_of((str,), arguments, "Decimal")
    return decimal.Decimal(*arguments)


def _fraction(*arguments):
    # "1e999999999" is text that Fraction would write out in full.
    fits = [type(a) is int or type(a) is str and re.fullmatch(r"[+-]?\d{1,4000}(/\d{1,4000})?", a) for a in arguments]
    need(all(fits) and len(fits) <= 2, "Fraction of something else")
    return fractions.Fraction(*arguments)


def _encode(text, encoding="utf-8"):
    need(type(text) is str and encoding in ("latin1", "latin-1", "utf-8"), "encode of something else")
    return text.encode(encoding)


def _path(cls):
    def make(*arguments):
        _all_of((str,), arguments, "path")
        flavour = cls if cls.__name__.startswith("Pure") or not cls.__name__.startswith("Windows") else None
        return (flavour or pathlib.PureWindowsPath)(*arguments)

    return make


def _enum_member(cls, *arguments):
    need(len(arguments) == 1, f"{cls.__name__} of several values")
    for member in cls.__members__.values():
        if type(member._value_) is type(arguments[0]) and member._value_ == arguments[0]:
            return member
    raise ValueError(f"{cls.__name__} has no member of the value {arguments[0]!r}")


def _named_member(table, cls, name):
    """Enum members are pickled as getattr(class, name) by Python 3.11."""
    need(type(name) is str, "getattr of something that is no name")
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum) and table.is_known(cls)):
        raise RefusedClass("builtins.getattr", table.path)
    return cls.__members__[name]


def _reconstruct(table, cls, base, state):
    need(isinstance(cls, type) and isinstance(base, type) and issubclass(cls, base), "an object of no class")
    return table.make(cls, () if base is object else (state,), {})


def _plain_rules():
    """{(module, name): (value, rule or None)}"""
    b, c = "builtins", "collections"
    rules = {
        (b, "bool"): (bool, _number(bool)),
        (b, "bytearray"): (bytearray, _raw(bytearray)),
        (b, "bytes"): (bytes, _raw(bytes)),
        (b, "complex"): (complex, _number(complex)),
        (b, "dict"): (dict, _mapping(dict)),
        (b, "float"): (float, _number(float)),
        (b, "int"): (int, _number(int)),
        (b, "object"): (object, None),
        (b, "range"): (range, _range),
        (b, "slice"): (slice, _slice),
        (b, "str"): (str, _text),
        (b, "Ellipsis"): (Ellipsis, None),
        (b, "NotImplemented"): (NotImplemented, None),
        (c, "OrderedDict"): (collections.OrderedDict, _mapping(collections.OrderedDict)),
        (c, "Counter"): (collections.Counter, _mapping(collections.Counter)),
        (c, "defaultdict"): (collections.defaultdict, _defaultdict),
        (c, "deque"): (collections.deque, _deque),
        ("datetime", "date"): (datetime.date, _of_plain(datetime.date)),
        ("datetime", "datetime"): (datetime.datetime, _of_plain(datetime.datetime, datetime.timezone)),
        ("datetime", "time"): (datetime.time, _of_plain(datetime.time, datetime.timezone)),
        ("datetime", "timedelta"): (datetime.timedelta, _of_plain(datetime.timedelta)),
        ("datetime", "timezone"): (datetime.timezone, _of_plain(datetime.timezone, datetime.timedelta)),
        ("decimal", "Decimal"): (decimal.Decimal, _decimal),
        ("fractions", "Fraction"): (fractions.Fraction, _fraction),
        ("uuid", "UUID"): (uuid.UUID, None),
        ("uuid", "SafeUUID"): (uuid.SafeUUID, None),
        ("argparse", "Namespace"): (argparse.Namespace, argparse.Namespace),
        ("types", "SimpleNamespace"): (types.SimpleNamespace, types.SimpleNamespace),
        ("_codecs", "encode"): (Word("_codecs.encode"), _encode),
        ("copyreg", "_reconstructor"): (Word("copyreg._reconstructor"), _reconstruct),
        ("builtins", "getattr"): (Word("builtins.getattr"), _named_member),
    }
    for cls in (list, tuple, set, frozenset):
        rules[b, cls.__name__] = cls, _sequence(cls)
    for name in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"):
        rules["pathlib", name] = getattr(pathlib, name), _path(getattr(pathlib, name))
    return rules


PLAIN_RULES = _plain_rules()
_WITH_TABLE = (_reconstruct, _named_member)


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


class Table:
    """The rules for one file. ``allow``: classes, functions or "module.name" that may do as they please."""

    def __init__(self, path, rules, allow=()):
        self.path, self.rules = path, rules
        self.builds = {}
        self._calls = {id(value): rule for value, rule in rules.values() if rule not in (None, RECORD)}
        self._values = [value for value, _ in rules.values()]  # ids stay theirs
        self._known = {value for value, rule in rules.values() if rule is RECORD}
        self._allowed_names = {name for name in allow if isinstance(name, str)}
        self._allowed = [value for value in allow if not isinstance(value, str)]

    # ---- names -----------------------------------------------------------------------------------------------------
    def find(self, module, name):
        """The value of a global. RefusedClass for what is not in the table."""
        module, name = _OLD_NAMES.get((module, name), (module, name))
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        for value in self._allowed:
            if full == f"{value.__module__}.{value.__qualname__}":
                return value
        if full in self._allowed_names:
            self._allowed.append(_resolve(importlib.import_module(module), name))
            return self._allowed[-1]
        if (module, name) in self.rules:
            return self.rules[module, name][0]
        found = _resolve(sys.modules.get(module), name)
        if isinstance(found, type) and is_plain_data(found):
            self._known.add(found)
            return found
        raise RefusedClass(full, self.path)

    def trusts(self, value):
        return any(value is allowed for allowed in self._allowed)

    def is_known(self, cls):
        return cls in self._known or any(cls is value for value in self._values)

    def refuse(self, value):
        name = getattr(value, "name", None) if isinstance(value, Word) else None
        return RefusedClass(name or f"{type(value).__module__}.{type(value).__qualname__}", self.path)

    # ---- what the machine does -------------------------------------------------------------------------------------
    def call(self, function, arguments):
        if self.trusts(function):
            return function(*arguments)
        rule = self._calls.get(id(function))
        if rule is not None:
            return rule(self, *arguments) if rule in _WITH_TABLE else rule(*arguments)
        if isinstance(function, type) and self.is_known(function):
            return self.make(function, arguments, {})
        raise self.refuse(function)

    def make(self, cls, arguments, keywords):
        if self.trusts(cls):
            return cls.__new__(cls, *arguments, **keywords)
        need(not keywords, "arguments by keyword")
        if id(cls) in self._calls:
            return self.call(cls, arguments)
        if not isinstance(cls, type) or not self.is_known(cls) or cls is object:
            raise self.refuse(cls)
        if issubclass(cls, enum.Enum):
            return _enum_member(cls, *arguments)
        return _bare_instance(cls, arguments)

    def append(self, target, items):
        """Whether items of a class that is let through have been appended."""
        if not self.trusts(type(target)):
            return False
        for item in items:
            target.append(item)
        return True

    def build(self, value, state):
        """Gives ``value`` its state: attributes, never through the class's own code."""
        cls = type(value)
        if self.trusts(cls):
            return _build_trusted(value, state)
        for known, rule in self.builds.items():
            if cls is known:
                return rule(value, state)
        if isinstance(value, enum.Enum) or not (cls in self._known or cls in _WITH_ATTRIBUTES):
            raise self.refuse(value)
        attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
        for given in (attributes, slots):
            need(given is None or type(given) is dict, f"a state of {cls.__name__} that is no dict")
            for name, item in (given or {}).items():
                _check_attribute(cls, name)
                object.__setattr__(value, name, item)


def _check_attribute(cls, name):
    """Attributes must not stand in for methods: somebody would call them."""
    need(type(name) is str and not (name.startswith("__") and name.endswith("__")), f"an attribute {name!r}")
    found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    own_place = isinstance(found, types.MemberDescriptorType) and found.__objclass__.__module__ not in _LIBRARY
    need(own_place or not (callable(found) or hasattr(found, "__get__")), f"an attribute {name!r} over a method")


def _bare_instance(cls, arguments):
    """An instance of plain data: what the base class makes of the arguments; ``__init__`` does not run."""
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
    for base, kinds in ((tuple, (list, tuple)), (frozenset, (list, tuple, set, frozenset)), (str, (str,)),
                        (bytes, (bytes,)), (int, (int,)), (float, (int, float))):  # fmt: skip
        if issubclass(cls, base):
            need(len(arguments) <= 1, f"arguments for {cls.__name__}")
            _all_of(kinds, arguments, cls.__name__)
            if base is frozenset:
                _keys(*arguments)
            return base.__new__(cls, *arguments)
    need(not arguments, f"arguments for {cls.__name__}")
    return object.__new__(cls)


def _build_trusted(value, state):
    if hasattr(value, "__setstate__"):
        value.__setstate__(state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    for given in (attributes, slots):
        for name, item in (given or {}).items():
            setattr(value, name, item)


def _resolve(module, name):
    """What a dotted name stands for, without asking a module's __getattr__; None if there is nothing."""
    found = module
    for part in name.split("."):
        try:
            found = vars(found).get(part)
        except TypeError:
            return None
    return found

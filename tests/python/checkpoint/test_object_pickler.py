"""The pickler of checkpoints writes what Python's own one writes, of every kind of object."""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import operator
import pathlib
import pickle
import random
import uuid

import numpy
import pytest
import torch

from deepspeed.checkpoint.write.file_writer import PreparedTorch
from refusals import refused


@dataclasses.dataclass
class Record:
    a: int
    b: object = None


class Color(enum.Enum):
    RED = 1


class Outer:
    class Inner:
        def __init__(self):
            self.x = [1]


class WithSlots:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a, self.b = 1, [2]


class NewArguments(tuple):
    def __new__(cls, *, first, second):
        return tuple.__new__(cls, (first, second))

    def __getnewargs_ex__(self):
        return (), {"first": self[0], "second": self[1]}


class OwnReduction:
    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return OwnReduction, (self.value,), {"more": 1}, None, None


class StateSetter:
    def __reduce__(self):
        return object.__new__, (StateSetter,), {"x": 1}, None, None, _set_state


def _set_state(target, state):
    vars(target).update(state)


class Items(dict):
    pass


Point = collections.namedtuple("Point", "x y")


def registered(value):
    return functools.partial(operator.add, value)


def recursive():
    made = [1]
    made.append(made)
    table = {"list": made}
    table["itself"] = table
    inside = ([],)
    inside[0].append(inside)
    long = ([], 1, 2, 3)
    long[0].append(long)
    cyclic = OwnReduction([])
    cyclic.value.append(Record(1))
    return [made, table, inside, long, cyclic]


VALUES = {
    "numbers": [0, 1, 255, 256, 65535, 65536, -1, -(1 << 31), 1 << 31, (1 << 31) - 1, -(1 << 63), 1 << 63, 1 << 100,
                -(1 << 100), 1 << 5000, -(1 << 2047), -128, -129, True, False, None, 0.0,
                -0.5, float("inf"), 1e300, 2j],
    "texts": ["", "é", "\ud800", "a" * 300, "\n", b"", b"\x00\xff", bytearray(), bytearray(b"ab")],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),))],
    "sets": [{1}, frozenset(), frozenset([(1, 2)]), set()],
    "long": [list(range(999)), list(range(1000)), list(range(1001)), {i: i for i in range(999)}],
    "shared": [["x"] * 2, [[1]] * 3, ("y", "y")],
    "collections": [collections.OrderedDict(a=1), collections.defaultdict(list, {1: [2]}), collections.Counter("aab"),
                    collections.deque([1, 2], 5), Point(1, "y"), range(3), slice(1, 2)],
    "classes": [int, type(None), type(...), type(NotImplemented), ..., NotImplemented, Outer.Inner, Record, Color,
                collections.OrderedDict, len, operator.add, recursive, Outer().__class__, dict.fromkeys],
    "objects": [Record(1, [2]), Color.RED, Outer.Inner(), WithSlots(), OwnReduction(3), StateSetter(), Items(a=1),
                NewArguments(first=1, second=[2]), registered(3)],
    "library": [datetime.datetime(2026, 1, 2), datetime.timedelta(1), decimal.Decimal("1.5"), fractions.Fraction(1, 3),
                pathlib.PurePosixPath("a/b"), uuid.UUID(int=5), random.Random(1).getstate()],
    "numpy": [numpy.arange(5), numpy.float32(2), numpy.dtype("f8"), numpy.array([["a"]])],
    "torch": [torch.float32, torch.Size([1, 2]), torch.device("cpu"), torch.strided],
    "recursive": recursive(),
}  # fmt: skip


def pickled(value):
    return PreparedTorch(value).native.texts[0]


@pytest.mark.parametrize("kind", VALUES)
def test_the_bytes_are_those_of_pythons_pickler(kind):
    values = [*VALUES[kind], VALUES[kind]]
    assert [pickled(value) for value in values] == [pickle.dumps(value, 2) for value in values]


def random_value(choose, depth):
    kinds = ["int", "text", "float", "bytes", "none"] + ["list", "tuple", "dict", "set", "object"] * (depth > 0)
    kind = choose.choice(kinds)
    count = choose.choice([0, 1, 2, 3, 4, 7])
    inner = [random_value(choose, depth - 1) for _ in range(count)] if depth > 0 else []
    made = {
        "int": lambda: choose.getrandbits(choose.randrange(1, 90)) * choose.choice([1, -1]),
        "text": lambda: "".join(choose.choice("aé\n\x00'") for _ in range(choose.randrange(9))),
        "float": choose.random,
        "bytes": lambda: choose.randbytes(choose.randrange(6)),
        "none": lambda: None,
        "list": lambda: inner + inner[:1],
        "tuple": lambda: tuple(inner),
        "dict": lambda: {i: item for i, item in enumerate(inner)},
        "set": lambda: {choose.randrange(99) for _ in inner},
        "object": lambda: Record(count, inner),
    }
    return made[kind]()


def test_random_structures():
    choose = random.Random(7)
    for _ in range(2000):
        value = random_value(choose, 5)
        assert pickled(value) == pickle.dumps(value, 2)


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("not me")


@pytest.mark.parametrize(
    "value, error, text",
    [
        (lambda: 0, pickle.PicklingError, "lambda"),
        (type("Local", (), {"__qualname__": "f.<locals>.Local"}), (pickle.PicklingError, AttributeError), "ocal"),
        (Unpicklable(), RuntimeError, "not me"),
        ((i for i in ()), TypeError, "pickle"),
    ],
    ids=["lambda", "local class", "an error of its own", "generator"],
)
def test_what_cannot_be_pickled(value, error, text):
    refused(error, text, PreparedTorch, [value])


def test_too_deep():
    value = []
    for _ in range(100_000):
        value = [value]
    refused(RecursionError, "", PreparedTorch, value)


def test_a_renamed_class_is_named():
    impostor = type("Record", (), {"__module__": __name__})
    refused(pickle.PicklingError, r"not the same object as .*Record", PreparedTorch, impostor())

"""Values of Python as JSON: exact, and nothing that could run code."""

import collections
import datetime
import json
import math
import pathlib

import numpy
import pytest
import torch

from deepspeed.checkpoint.layouts import saved_native
from refusals import refused

VALUES = [
    None, True, 0, -7, 2**80, 0.1, math.inf, "text", "$text", [], {}, (), (1, (2, [3])), {"a": {"b": (1,)}},
    {1: "a", None: 2, (1, 2): 3}, {"$tuple": [1]}, {"$a": 1, "b": 2}, {1, 2}, frozenset("ab"), b"\0\xff", 1 + 2j,
    torch.float32, torch.bfloat16, torch.Size([2, 3]), collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.Counter("aab"), collections.deque([1, 2]), pathlib.PosixPath("a/b"),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6), numpy.float32(0.5), numpy.int64(3),
]  # fmt: skip


def name(value):
    """The same in every process: a set's own order is not."""
    return f"frozenset of {sorted(value)}" if isinstance(value, frozenset) else repr(value)


@pytest.mark.parametrize("value", VALUES, ids=name)
def test_comes_back_as_it_was(value):
    tensors = {}
    text = json.dumps(saved_native.encode({"value": value}, tensors))
    found = saved_native.decode(json.loads(text), tensors.__getitem__)["value"]
    assert found == value and type(found) is type(value)
    if isinstance(value, dict):
        assert list(found) == list(value)


def test_tensors_and_arrays_go_elsewhere():
    value = {
        "t": [torch.arange(3), {"x": torch.ones(2, 2, dtype=torch.bfloat16)}],
        "n": numpy.arange(6.0).reshape(2, 3),
    }
    tensors = {}
    text = json.dumps(saved_native.encode(value, tensors, "client"))
    assert sorted(tensors) == ["client.n", "client.t.0", "client.t.1.x"]
    found = saved_native.decode(json.loads(text), tensors.__getitem__)
    assert torch.equal(found["t"][0], value["t"][0]) and found["t"][1]["x"].dtype == torch.bfloat16
    assert numpy.array_equal(found["n"], value["n"]) and found["n"].dtype == value["n"].dtype


def test_keys_with_dots_do_not_meet():
    value = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2), "b#2": torch.full((2,), 2.0)}}
    tensors = {}
    found = saved_native.decode(json.loads(json.dumps(saved_native.encode(value, tensors))), tensors.__getitem__)
    assert len(tensors) == 3
    assert [float(t[0]) for t in (found["a.b"], found["a"]["b"], found["a"]["b#2"])] == [0, 1, 2]


@pytest.mark.parametrize(
    "array",
    [numpy.arange(4, dtype=">i4"), numpy.arange(3, dtype=numpy.uint64) + 2**63, numpy.zeros((0, 3)), numpy.array(5.0),
     numpy.arange(6.0).reshape(2, 3).T, numpy.longdouble([0.1])],
    ids=str,
)  # fmt: skip
def test_arrays_of_any_numbers(array):
    tensors = {}
    found = saved_native.decode(json.loads(json.dumps(saved_native.encode(array, tensors))), tensors.__getitem__)
    assert found.dtype == array.dtype and found.shape == array.shape and numpy.array_equal(found, array)


def test_the_text_is_json_for_everybody():
    text = json.dumps(saved_native.encode([math.inf, -math.inf, math.nan], {}), allow_nan=False)
    found = saved_native.decode(json.loads(text), {}.__getitem__)
    assert found[:2] == [math.inf, -math.inf] and math.isnan(found[2])


class Mine:
    pass


@pytest.mark.parametrize(
    "value", [Mine(), Mine, len, torch.nn.Linear(1, 1), numpy.array([None])], ids=lambda value: type(value).__name__
)
def test_what_only_a_pickle_could_hold_is_named(value):
    refused(saved_native.NotPlain, r"client_state\.a\.1 is a .*writer", saved_native.encode, {"a": [0, value]}, {})


@pytest.mark.parametrize("text", ['{"$call": ["os.system", "true"]}', '{"$dtype": "save"}', '{"$x": 1}'])
def test_unknown_words_are_refused(text):
    refused(ValueError, "does not know", saved_native.decode, json.loads(text), {})

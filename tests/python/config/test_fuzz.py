"""Random Python objects as configurations: a DeepSpeedConfig or a DeepSpeedConfigError, nothing else.

The texts are fuzzed in tests/cpp/config/fuzz_test.cpp; here it is the way in from Python.
"""

import collections
import enum
import json
import os
import pathlib
import random

import numpy
import torch

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.config.model import layout

CASES = int(os.environ.get("DS_FUZZ_CASES", "3000")) // 3


class Text(str, enum.Enum):
    cpu = "cpu"


class Number(enum.IntEnum):
    two = 2


class Hostile:
    def __repr__(self):
        raise RuntimeError("no repr")

    def __index__(self):
        raise RuntimeError("no index")


VALUES = [
    None, True, False, 0, 1, -1, 2, 8, 5e8, 0.5, float("nan"), float("inf"), -float("inf"), 10**400, -(10**30), 2**63,
    "auto", "", "cpu", "Adam", "\ud800", "x" * 5000, b"bytes", (1, 2), [], {}, {1: 2}, {"a": {3}}, set(), range(3),
    Text.cpu, Number.two, Hostile(), object(), int, len, torch.float16, torch.zeros(3), torch.tensor(1), numpy.int64(4),
    numpy.float32(0.5), numpy.zeros(2), pathlib.Path("/x"), collections.OrderedDict(a=1), collections.defaultdict(list),
    lambda: 1,
]  # fmt: skip


def make(rng, fields, depth=0):
    out = {}
    for _ in range(rng.randrange(4)):
        known = fields and rng.random() < 0.9
        key = rng.choice(list(fields) if known else ["x", " stage", 7, None, "\udfff"])
        inner = fields.get(key, {}).get("fields") if fields else None
        if inner is not None and rng.random() < 0.8 and depth < 5:
            out[key] = make(rng, inner, depth + 1)
        else:
            out[key] = rng.choice(VALUES)
    return out


def test_python_objects():
    rng, fields = random.Random(3), layout("training")
    made = refused = 0
    for _ in range(CASES):
        config = make(rng, fields)
        config.setdefault("train_micro_batch_size_per_gpu", 1)
        try:
            DeepSpeedConfig(config)
            made += 1
        except DeepSpeedConfigError:
            refused += 1
    assert made > CASES / 50 and refused > CASES / 3


def test_files_of_broken_bytes(tmp_path):
    """Texts that the reader refuses, seen from Python: truncated, nested, not UTF-8, numbers without end."""
    rng, path = random.Random(5), tmp_path / "ds.json"
    good = json.dumps({"train_batch_size": 8, "zero_optimization": {"reduce_bucket_size": 10**30}, "x": ["é"] * 9})
    for _ in range(CASES):
        data = bytearray(good.encode())
        for _ in range(rng.randrange(4)):
            at, what = rng.randrange(len(data)), rng.randrange(4)
            if what == 0:
                del data[at:]
            elif what == 1:
                data[at : at + 1] = bytes([rng.randrange(256)])
            elif what == 2:
                data[at:at] = rng.choice([b"[", b'{"a":', b"\xff", b"/*"]) * rng.randrange(1, 3000)
            else:
                data[at:at] = b"9" * rng.randrange(1, 500)
            data = data or bytearray(b" ")
        path.write_bytes(data)
        try:
            DeepSpeedConfig(path)
        except DeepSpeedConfigError as error:
            assert str(error).startswith(str(path))


def test_values_that_are_no_configuration():
    for value in VALUES:
        if isinstance(value, dict):
            continue
        try:
            DeepSpeedConfig(value)
        except DeepSpeedConfigError:
            continue
        raise AssertionError(f"{value!r} was taken for a configuration")

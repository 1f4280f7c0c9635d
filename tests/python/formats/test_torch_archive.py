"""Reading files of torch.save: what comes back is what torch.load gives, whole or tensor by tensor."""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import glob
import os
import pathlib
import pickle
import random
import textwrap
import uuid
import zipfile
from unittest import mock

import numpy as np
import pytest
import torch

import deepspeed  # noqa: F401
from deepspeed.checkpoint.layouts import storage
from deepspeed.formats import standalone_reader
from deepspeed.formats.torch_archive import LazyTensor, RefusedClass, load
from places import PEERS
from refusals import refused


class Color(enum.Enum):
    RED = 1
    GREEN = "g"


class Level(int, enum.Enum):
    LOW = 1


class Attributes(dict):
    def __getattr__(self, name):
        return self[name]


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Settings:
    size: int = 1
    names: list = None


class Counted:
    """Not plain data."""

    def __init__(self):
        self.value = 5


def tensors():
    base = torch.arange(20.0)
    return {
        "view": base[3:9].view(2, 3),
        "transposed": base.view(4, 5).t(),
        "expanded": base[:1].expand(6),
        "bf16": base.bfloat16(),
        "half": base.half(),
        "complex": torch.complex(base, -base),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "bool": torch.tensor([True, False]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "wanted": torch.ones(2, requires_grad=True),
    }


def plain():
    return {
        "numbers": [1, -5, 255, 65536, 2**70, -(2**70), 3.5, float("inf"), None, True, 1j],
        "text": ["", "ü", "\ud800", b"ab", bytearray(b"x")],
        "sets": [{1, 2}, frozenset([3]), {(1, "a"), Color.RED}],
        "collections": [
            collections.OrderedDict(a=1),
            collections.defaultdict(list, a=[1]),
            collections.deque([1, 2], maxlen=5),
            collections.Counter("aab"),
        ],
        "times": [
            datetime.datetime(2020, 1, 2, 3, 4, 5, 6, datetime.timezone.utc),
            datetime.date(2020, 1, 1),
            datetime.timedelta(days=2, seconds=1),
            datetime.time(1, 2),
        ],
        "values": [pathlib.Path("/a/b"), decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.uuid4(), range(5)],
        "namespace": argparse.Namespace(a=1, b=[2]),
        "torch": [torch.float16, torch.device("cuda", 1), torch.Size([1, 2])],
        "mine": [Color.RED, Color.GREEN, Level.LOW, Attributes(a=1), Pair(1, [2]), Settings(3, ["x"]), int, Settings],
        "many": list(range(3000)),
    }


def arrays():
    return {
        "f8": np.arange(6.0).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "text": np.array(["ab", "c"]),
        "empty": np.zeros((0, 3), np.float32),
        "scalars": [np.int64(3), np.float32(1.5), np.bool_(True)],
        "generator": np.random.get_state(),
    }


def same(a, b):
    """Whether two objects are equal with all their types; a LazyTensor equals the tensor it reads."""
    if isinstance(b, LazyTensor):
        return (
            same(a.detach(), b.read().detach())
            and tuple(a.stride()) == b.stride
            and a.requires_grad == b.requires_grad
            and torch.equal(a.reshape(-1), b.read_range(0, b.numel()))
        )
    if type(a) is not type(b):
        return False
    if torch.is_tensor(a):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) and a.requires_grad == b.requires_grad
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if hasattr(a, "__dict__") and type(a).__eq__ is object.__eq__:
        return same(vars(a), vars(b))
    return a == b


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("make", [tensors, plain, arrays])
def test_reads_what_torch_saves(make, protocol, zipped, tmp_path):
    torch.save(make(), tmp_path / "x.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    expected = torch.load(tmp_path / "x.pt", weights_only=False)
    assert same(expected, load(tmp_path / "x.pt")) and same(expected, load(tmp_path / "x.pt", lazy=True))
    assert same(expected, load(tmp_path / "x.pt", trust=True))
    assert same(expected, load(tmp_path / "x.pt", lazy=True, trust=True))


@pytest.mark.parametrize("path", sorted(glob.glob(f"{PEERS}/*/*/*.pt")), ids=lambda p: "/".join(p.split("/")[-3::2]))
def test_reads_files_of_another_implementation(path):
    expected = torch.load(path, map_location="cpu", weights_only=False)
    assert same(expected, load(path)) and same(expected, load(path, lazy=True))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_tensors_that_share_memory_go_on_sharing_it(zipped, tmp_path):
    base = torch.arange(6.0)
    torch.save([base, base[2:4], base], tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    whole, part, again = load(tmp_path / "x.pt")
    assert again is whole
    whole[2] = 9
    assert part[0] == 9
    first, second, third = load(tmp_path / "x.pt", lazy=True)
    assert third is first and second is not first and second.memory is first.memory


def test_state_dicts_keep_their_metadata(tmp_path):
    torch.save(torch.nn.BatchNorm1d(3).state_dict(), tmp_path / "x.pt")
    assert load(tmp_path / "x.pt")._metadata == torch.nn.BatchNorm1d(3).state_dict()._metadata


def test_random_states_come_back(tmp_path):
    torch.save([random.getstate(), torch.get_rng_state(), torch.eye(3).to_sparse()], tmp_path / "x.pt")
    python, generator, sparse = load(tmp_path / "x.pt")
    assert python == random.getstate() and torch.equal(generator, torch.get_rng_state())
    assert torch.equal(sparse.to_dense(), torch.eye(3))


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="torch 1.13 cannot pickle generators and has no 8-bit floats")
def test_generators_and_new_dtypes(tmp_path):
    generator = torch.Generator().manual_seed(5)
    values = [torch.arange(4.0).to(torch.float8_e4m3fn), torch.arange(4).to(torch.uint16)]
    torch.save([generator, values], tmp_path / "x.pt")
    for lazy in (False, True):
        found, eights = load(tmp_path / "x.pt", lazy=lazy)
        assert torch.equal(found.get_state(), generator.get_state())
        for value, expected in zip(eights, values):
            value = value.read() if lazy else value
            assert value.dtype == expected.dtype and torch.equal(value.view(torch.uint8), expected.view(torch.uint8))


def test_a_range_of_a_lazy_tensor_reads_that_range_and_nothing_else(tmp_path, monkeypatch):
    torch.save({"x": torch.arange(1000000.0), "t": torch.arange(12.0).view(3, 4).t()}, tmp_path / "x.pt")
    found = load(tmp_path / "x.pt", lazy=True)
    preadv = mock.Mock(wraps=os.preadv)
    monkeypatch.setattr(os, "preadv", preadv)
    assert found["x"].shape == (1000000,) and found["x"].dtype == torch.float32 and found["x"].numel() == 1000000
    assert not preadv.called
    assert torch.equal(found["x"].read_range(777, 5), torch.arange(777.0, 782.0))
    assert [sum(map(len, call.args[1])) for call in preadv.call_args_list] == [20]
    assert torch.equal(found["t"].read_range(1, 3), torch.tensor([4.0, 8.0, 1.0]))
    for start, numel in ((-1, 1), (999999, 2), (0, -1)):
        refused(IndexError, "1000000", found["x"].read_range, start, numel)


def repacked(path, method, order=None):
    """The records of a zip file in another zip file, with a record of the byte order."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    if order is not None:
        records[next(iter(records)).split("/")[0] + "/byteorder"] = order.encode()
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def test_packed_records_are_unpacked(tmp_path):
    torch.save(tensors(), tmp_path / "x.pt")
    expected = torch.load(tmp_path / "x.pt", weights_only=False)
    repacked(tmp_path / "x.pt", zipfile.ZIP_DEFLATED)
    assert same(expected, load(tmp_path / "x.pt")) and same(expected, load(tmp_path / "x.pt", lazy=True))


def test_files_of_the_other_byte_order(tmp_path):
    torch.save([torch.arange(3, dtype=torch.int16), torch.tensor([1 + 2j])], tmp_path / "x.pt")
    repacked(tmp_path / "x.pt", zipfile.ZIP_STORED, order="big")
    whole, number = load(tmp_path / "x.pt", lazy=True)
    assert whole.read().tolist() == [0, 256, 512]
    assert number.read().view(torch.float32).numpy().byteswap().tolist() == [1.0, 2.0]


def test_zip64_is_read(tmp_path):
    """More records than a short directory holds, and what torch has saved behind them."""
    torch.save([torch.tensor([i]) for i in range(3)], tmp_path / "small.pt")
    with zipfile.ZipFile(tmp_path / "small.pt") as small, zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for number in range(66000):
            archive.writestr(zipfile.ZipInfo(f"archive/extra/{number}"), b"")
        for name in small.namelist():
            archive.writestr("archive/" + name.split("/", 1)[1], small.read(name))
        assert len(archive.infolist()) > 0xFFFF
    assert [one.read().item() for one in load(tmp_path / "x.pt", lazy=True)] == [0, 1, 2]


@pytest.mark.every("70,000 tensors")
def test_many_tensors_are_read(tmp_path):
    torch.save(list(range(70000)) and [torch.tensor([i]) for i in range(70000)], tmp_path / "x.pt")
    found = load(tmp_path / "x.pt", lazy=True)
    assert [found[i].read().item() for i in (0, 1, 65535, 69999)] == [0, 1, 65535, 69999]


@pytest.mark.slow
def test_records_beyond_four_gigabytes(tmp_path):
    """A sparse file: between the records is nothing."""
    path = tmp_path / "x.pt"
    torch.save({"x": torch.arange(3.0)}, tmp_path / "small.pt")
    with zipfile.ZipFile(tmp_path / "small.pt") as small, zipfile.ZipFile(path, "w") as archive:
        for name in small.namelist():
            archive.writestr(name, small.read(name))
            archive.start_dir = max(archive.start_dir, 5 << 30)
    assert path.stat().st_size > 5 << 30 and torch.equal(load(path, lazy=True)["x"].read(), torch.arange(3.0))


def test_a_class_is_let_through_when_asked_for(tmp_path, monkeypatch):
    torch.save({"counted": Counted()}, tmp_path / "x.pt")
    error = refused(RefusedClass, "", load, tmp_path / "x.pt")
    assert error.name == f"{Counted.__module__}.Counted" and str(tmp_path / "x.pt") in str(error)
    assert load(tmp_path / "x.pt", allow=[Counted])["counted"].value == 5
    assert load(tmp_path / "x.pt", allow=["another.name", Counted])["counted"].value == 5
    assert load(tmp_path / "x.pt", trust=True)["counted"].value == 5
    monkeypatch.setenv("DS_CHECKPOINT_TRUST", "1")
    assert load(tmp_path / "x.pt")["counted"].value == 5
    refused(RefusedClass, "", load, tmp_path / "x.pt", trust=False)


def test_a_name_is_let_through_and_imported(tmp_path):
    torch.save({"made": textwrap.TextWrapper(width=33)}, tmp_path / "x.pt")
    refused(RefusedClass, "textwrap.TextWrapper", load, tmp_path / "x.pt")
    assert load(tmp_path / "x.pt", allow=["textwrap.TextWrapper"])["made"].width == 33


def test_storage_read_names_file_and_reason(tmp_path):
    torch.save({"counted": Counted()}, tmp_path / "x.pt")
    refused(RefusedClass, "Counted", storage.read, tmp_path / "x.pt")
    (tmp_path / "half.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:300])
    refused(RuntimeError, "half.pt is damaged", storage.read, tmp_path / "half.pt")
    refused(FileNotFoundError, "no file", storage.read, tmp_path / "none.pt")


def test_a_file_that_was_replaced_is_not_mixed_up(tmp_path):
    torch.save(torch.arange(3.0), tmp_path / "x.pt")
    found = load(tmp_path / "x.pt", lazy=True)
    torch.save(torch.arange(9.0), tmp_path / "y.pt")
    os.replace(tmp_path / "y.pt", tmp_path / "x.pt")
    refused(OSError, "changed", found.read)


def test_refusals_can_be_pickled():
    """Errors travel between ranks."""
    error = pickle.loads(pickle.dumps(RefusedClass("a.b", "file")))
    assert error.name == "a.b" and error.path == "file"


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_damaged_file_is_an_error_and_nothing_worse(zipped, tmp_path):
    """Hundreds of files with some wrong bytes: each is read, or refused with an error for it."""
    torch.save({**tensors(), **plain(), **arrays()}, tmp_path / "x", _use_new_zipfile_serialization=zipped)
    good, generator, damaged = (tmp_path / "x").read_bytes(), random.Random(5), 0
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            bad[generator.randrange(len(bad))] = generator.randrange(256)
        (tmp_path / "y").write_bytes(bad[: generator.randrange(len(bad))] if generator.random() < 0.1 else bad)
        try:
            load(tmp_path / "y", lazy=generator.random() < 0.5)
        except (pickle.UnpicklingError, zipfile.BadZipFile) as error:
            damaged += 1
            assert str(error)
    assert damaged > 40


def like(a, b):
    """Whether ``b`` is ``a`` as far as the reader without the package makes it: other data stay ``Unused``."""
    if isinstance(b, standalone_reader.Unused):
        return not torch.is_tensor(a)
    if isinstance(a, LazyTensor) or torch.is_tensor(a):
        return type(a) is type(b) and (torch.equal(a.read(), b.read()) if isinstance(a, LazyTensor) else same(a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and len(a) == len(b) and all(like(x, y) for x, y in zip(a.values(), b.values()))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(like(x, y) for x, y in zip(a, b))
    return isinstance(a, enum.Enum) or same(a, b)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("path", sorted(glob.glob(f"{PEERS}/*/*/*.pt")), ids=lambda p: "/".join(p.split("/")[-3::2]))
def test_the_reader_without_the_package_reads_the_same(path, lazy):
    assert like(load(path, lazy=lazy), standalone_reader.load(path, lazy=lazy, trust=False))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_the_reader_without_the_package_reads_tensors_and_arrays(zipped, tmp_path):
    simple = {name: value for name, value in plain().items() if name not in ("mine", "sets")}
    value = {"tensors": tensors(), "arrays": arrays(), "plain": simple}
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert like(load(tmp_path / "x.pt"), standalone_reader.load(tmp_path / "x.pt", trust=False))
    torch.save({"counted": Counted()}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    refused(RefusedClass, "Counted", standalone_reader.load, tmp_path / "x.pt", trust=False)


def test_elements_are_read_straight_into_memory_that_is_there(tmp_path):
    value = torch.arange(3_000_000.0)
    torch.save({"x": value, "t": value[:12].view(3, 4).t(), "half": value[:8].half()}, tmp_path / "x.pt")
    found = load(tmp_path / "x.pt", lazy=True)
    target = torch.zeros(2_500_001)
    assert found["x"].fill(target[1:], 400_000)
    assert target[0] == 0 and torch.equal(target[1:], value[400_000:2_900_000])
    for name, start, memory in (
        ("t", 0, torch.zeros(12)),  # in another order in the file
        ("half", 0, torch.zeros(8)),  # of another type
        ("x", 2_999_999, torch.zeros(2)),  # not all there
    ):
        assert not found[name].fill(memory, start) and not memory.any()
    os.truncate(tmp_path / "x.pt", os.path.getsize(tmp_path / "x.pt") - 1)
    refused(OSError, "changed", found["x"].fill, target[1:], 0)

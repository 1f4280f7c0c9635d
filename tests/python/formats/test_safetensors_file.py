"""The safetensors format, written and read without the package."""

import json
import struct

import pytest
import torch

from deepspeed.formats.safetensors_file import SAFETENSORS_DTYPES, DamagedSafetensors, read_safetensors
from deepspeed.formats.weight_files import write_safetensors
from refusals import refused


def test_every_dtype_comes_back(tmp_path):
    values = {name: torch.arange(-8, 16, dtype=torch.int8).view(torch.uint8) for name in SAFETENSORS_DTYPES}
    values = {
        name: (value % 2).bool() if dtype == torch.bool else value.view(dtype).view(-1, 1)
        for (name, value), dtype in zip(values.items(), SAFETENSORS_DTYPES.values())
    }
    values.update({"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3), "turned": torch.arange(6.0).view(2, 3).t()})
    write_safetensors(str(tmp_path / "x"), values)
    found, metadata = read_safetensors(tmp_path / "x")
    assert metadata == {"format": "pt"} and set(found) == set(values)
    for name, value in values.items():
        read = found[name].read()
        assert read.dtype == value.dtype and read.shape == value.shape, name
        assert read.contiguous().reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist()
        assert found[name].memory.source.offset % value.element_size() == 0


def test_the_package_agrees(tmp_path):
    package = pytest.importorskip("safetensors.torch")
    values = {"a": torch.randn(3, 4), "b": torch.arange(3), "c": torch.randn(2).bfloat16()}
    write_safetensors(str(tmp_path / "ours"), values)
    assert all(torch.equal(value, values[name]) for name, value in package.load_file(tmp_path / "ours").items())
    package.save_file(values, tmp_path / "theirs", {"note": "x"})
    found, metadata = read_safetensors(tmp_path / "theirs")
    assert metadata == {"note": "x"} and all(torch.equal(found[name].read(), values[name]) for name in values)


def file_of(header, data=bytes(16), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(4,), begin=0, end=16):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HOSTILE = {
    "nothing": b"",
    "short": b"\x01",
    "header_of_an_exabyte": struct.pack("<Q", 1 << 60) + b"{}",
    "header_longer_than_the_file": file_of({}, length=100, data=b""),
    "no_json": file_of(b"{"),
    "no_text": file_of(b"\xff\xfe{}"),
    "a_list": file_of([1]),
    "nested_without_end": file_of(b"[" * 100000 + b"]" * 100000),
    "name_twice": file_of(b'{"a": {}, "a": {}}'),
    "outside": file_of({"a": entry(begin=16, end=32)}),
    "far_outside": file_of({"a": entry(begin=1 << 62, end=(1 << 62) + 16)}),
    "negative": file_of({"a": entry(begin=-16, end=0)}),
    "negative_shape": file_of({"a": entry(shape=(-4, -1))}),
    "overflow": file_of({"a": entry(shape=(1 << 40, 1 << 40))}),
    "huge_and_empty": file_of({"a": entry(shape=(1 << 80, 0), end=0)}),
    "shape_of_text": file_of({"a": entry(shape=("4",))}),
    "shape_of_another_size": file_of({"a": entry(shape=(3,))}),
    "backwards": file_of({"a": entry(begin=16, end=0)}),
    "overlap": file_of({"a": entry(), "b": entry(begin=8, end=16, shape=(2,))}),
    "unknown_dtype": file_of({"a": entry(dtype="O")}),
    "dtype_no_text": file_of({"a": entry(dtype=["F32"])}),
    "no_offsets": file_of({"a": {"dtype": "F32", "shape": [4]}}),
    "no_entry": file_of({"a": 5}),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_file_that_lies_is_refused(name, tmp_path):
    (tmp_path / "x").write_bytes(HOSTILE[name])
    refused(DamagedSafetensors, str(tmp_path / "x"), read_safetensors, tmp_path / "x")

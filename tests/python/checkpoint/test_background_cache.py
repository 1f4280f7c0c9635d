"""Host memory for snapshots: bounded, used again, and what is in it does not change any more."""

import time

import pytest
import torch

from deepspeed.checkpoint.write import file_writer
from deepspeed.checkpoint.write.file_writer import prepare
from deepspeed.checkpoint.write.snapshot import HostCache, Snapshot
from threads import started

MIB = 1 << 20


def test_blocks_are_used_again():
    cache = HostCache()
    first = cache.take(3 * MIB)
    address = first.memory.data_ptr()
    cache.give_back(first)
    assert cache.take(3 * MIB - 100_000).memory.data_ptr() == address and cache.held_bytes == first.bytes
    assert cache.take(3 * MIB).memory.data_ptr() != address and cache.held_bytes == 2 * first.bytes


def test_what_nobody_uses_goes_back():
    cache = HostCache(8 * MIB)
    kept, free = cache.take(2 * MIB), cache.take(3 * MIB)
    cache.give_back(free)
    assert cache.has_room(6 * MIB) and not cache.has_room(6 * MIB + 1)
    cache.release()
    assert cache.held_bytes == kept.bytes == 2 * MIB


def test_the_bound_holds_and_waiting_ends_when_there_is_room():
    cache = HostCache(4 * MIB)
    assert cache.fits(4 * MIB) and not cache.fits(4 * MIB + 1)
    held = [cache.take(2 * MIB), cache.take(2 * MIB)]
    taken = started(cache.take, 4 * MIB)
    time.sleep(0.05)
    cache.give_back(held.pop())
    time.sleep(0.05)
    assert not taken.done()
    cache.give_back(held.pop())
    assert taken.result(10).bytes == 4 * MIB and cache.peak_bytes == 4 * MIB


def tensors():
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(37, 53, generator=generator)
    return {
        "plain": torch.randn(1000, generator=generator),
        "large": torch.randn(3 * MIB, generator=generator),
        "transposed": wide.t(),
        "columns": wide[:, 3:17],
        "every second": wide[::2],
        "expanded": torch.randn(5, 1, generator=generator).expand(5, 7),
        "half": torch.randn(33, generator=generator).half(),
        "bf16 columns": wide.bfloat16()[:, ::3],
        "flags": wide > 0,
        "flag columns": (wide > 0)[:, 1:4],
        "complex": torch.randn(9, 4, dtype=torch.complex64, generator=generator)[:, 1:].conj(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "numbers": torch.arange(7),
    }


def dirty_cache(bytes):
    """A cache whose memory, which the next taker of more than half of it gets, was in use before."""
    cache = HostCache()
    block = cache.take(bytes)
    block.memory.fill_(0xAB)
    cache.give_back(block)
    return cache


@pytest.mark.parametrize("kind", ["state.pt", "state.safetensors"])
def test_a_snapshot_does_not_change(kind, tmp_path):
    values = tensors()
    if kind.endswith("safetensors"):
        del values["complex"]
    expected = {name: tensor.clone().contiguous() for name, tensor in values.items()}
    path = tmp_path / kind
    prepared = prepare(kind, values if kind.endswith(".pt") else (values, {"a": "b"}))
    direct = prepared.write(tmp_path / ("direct" + kind))
    cache = dirty_cache(16 * MIB)
    prepared.sources = Snapshot(cache).add(prepared.sources).sources
    assert cache.held_bytes == 16 * MIB
    for tensor in values.values():
        tensor = tensor if tensor.is_contiguous() else tensor._base
        tensor.zero_()
    record = prepared.write(path)
    assert record["crc32"] == direct["crc32"] and record["tensors"] == direct["tensors"]
    assert path.read_bytes() == (tmp_path / ("direct" + kind)).read_bytes()
    if kind.endswith(".pt"):
        loaded = torch.load(path)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_kinds_by_name(tmp_path):
    assert isinstance(prepare("a.json", b"{}"), file_writer.PreparedBytes)
    assert isinstance(prepare("a.safetensors", ({}, None)), file_writer.PreparedSafetensors)
    made = prepare("a.pt", {"x": 1})
    assert isinstance(made, file_writer.PreparedTorch) and prepare("b", made) is made
    assert prepare("a.json", b"{}").write(tmp_path / "a.json")["bytes"] == 2

"""Copies of one save: memory of several files once, some of it late."""

import ctypes
import threading
from unittest import mock

import pytest
import torch

from deepspeed.checkpoint.write import snapshot as snapshots
from deepspeed.checkpoint.write.file_writer import prepare
from deepspeed.checkpoint.write.snapshot import HeldSnapshot, HostCache, MemoryRanges, Snapshot
from processes import wait_for
from refusals import refused
from threads import started

MIB = 1 << 20


def sources(**tensors):
    return prepare("state.pt", tensors).sources


def contents(copies):
    return [b"".join(ctypes.string_at(*piece) for piece in source.pieces()) for source in copies.sources]


def raw(tensor):
    return tensor.contiguous().numpy().tobytes()


class States:
    """Stands for ``HeldStates``: the memory of ``tensors``."""

    def __init__(self, *tensors):
        self.log = []
        self._ranges = MemoryRanges()
        for tensor in tensors:
            self._ranges.add(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def cover(self, address, bytes):
        return self._ranges.find(address, bytes) is not None

    def hold(self):
        self.log.append("hold")

    def let_go(self):
        self.log.append("let go")

    def check_unchanged(self):
        pass


def test_ranges():
    ranges = MemoryRanges()
    for start, bytes in ((100, 50), (10, 20), (200, 1)):
        ranges.add(start, bytes, f"from {start}")
    assert ranges.find(100, 50) == (100, "from 100") and ranges.find(149, 1) == (100, "from 100")
    assert ranges.find(10, 20) == (10, "from 10") and ranges.find(200, 1) == (200, "from 200")
    for address, bytes in ((9, 1), (9, 5), (29, 2), (30, 1), (149, 2), (99, 3), (200, 2), (500, 1)):
        assert ranges.find(address, bytes) is None, address


def test_memory_of_two_files_is_copied_once():
    flat = torch.arange(3 * MIB, dtype=torch.float32)
    whole, part, other = flat[:MIB], flat[1000:2000], torch.ones(1000)
    expected = [raw(whole), raw(part), raw(other)]
    cache = HostCache()
    snapshot = Snapshot(cache)
    first = snapshot.add(sources(whole=whole))
    second = snapshot.add(sources(part=part, other=other))
    held = cache.held_bytes
    assert held < 4 * MIB + 200_000  # the part is where the whole is
    flat.zero_(), other.zero_()
    assert contents(first) + contents(second) == expected
    snapshot.start_late_copies()
    first.give_back()
    taken = cache.take(4 * MIB)  # not the block that the second file needs as well
    taken.memory.fill_(1)
    assert contents(second) == expected[1:]
    second.give_back()
    assert cache.take(4 * MIB).memory.data_ptr() != taken.memory.data_ptr() and cache.held_bytes == held + taken.bytes


def test_states_are_copied_late(monkeypatch):
    weight, state = torch.randn(1000), torch.randn(2000)
    expected = [raw(weight), raw(state)]
    states = States(state)
    snapshot = Snapshot(HostCache(), states)
    copies = snapshot.add(sources(weight=weight, state=state))
    weight.zero_()
    go, made = threading.Event(), snapshots._copy
    monkeypatch.setattr(snapshots, "_copy", lambda *args: (go.wait(10), made(*args)))
    snapshot.start_late_copies()
    assert states.log == ["hold"]
    go.set()
    copies.wait()
    assert contents(copies) == expected
    wait_for(lambda: states.log == ["hold", "let go"])


def test_a_full_cache_gets_its_room_back_from_late_copies():
    # The second file waits for the first one's memory, which is written when its late copies are made.
    first, second = torch.randn(MIB // 4), torch.randn(MIB // 4)
    expected = [raw(first), raw(second)]
    snapshot = Snapshot(HostCache(MIB + 65536), States(first, second))
    copies = snapshot.add(sources(first=first))

    def write():
        copies.wait()
        found = contents(copies)
        copies.give_back()
        return found

    writer = started(write)
    others = snapshot.add(sources(first=first, second=second)[1:])
    found = writer.result(10)
    snapshot.start_late_copies()
    others.wait()
    assert found + contents(others) == expected
    assert snapshot.add(sources(large=torch.zeros(MIB))) is None


def test_a_late_copy_that_fails_is_told(monkeypatch):
    state = torch.randn(100)
    states = States(state)
    snapshot = Snapshot(HostCache(), states)
    copies = snapshot.add(sources(state=state))
    monkeypatch.setattr(snapshots, "_copy", mock.Mock(side_effect=RuntimeError("no memory")))
    snapshot.start_late_copies()
    refused(RuntimeError, "no memory", copies.wait)
    wait_for(lambda: len(states.log) == 2)


@pytest.mark.parametrize("kind", [Snapshot, HeldSnapshot])
def test_dropped_copies_do_not_wait(kind):
    state = torch.randn(100)
    snapshot = kind(HostCache(), States(state))
    copies = snapshot.add(sources(state=state))
    snapshot.drop()
    refused(RuntimeError, "given up", copies.wait)


def test_held_states_are_not_copied_but_held_until_they_are_written():
    weight, state = torch.randn(1000), torch.randn(MIB)
    expected = [raw(weight), raw(state)]
    cache, states = HostCache(), States(state)
    snapshot = HeldSnapshot(cache, states)
    copies = snapshot.add(sources(weight=weight, state=state))
    weight.zero_()
    waiting = started(copies.wait)
    assert states.log == [] and not waiting.done()
    snapshot.start_late_copies()
    waiting.result(10)
    assert states.log == ["hold"]
    assert contents(copies) == expected and copies.sources[1].pieces() == [(state.data_ptr(), 4 * MIB)]
    assert cache.held_bytes < 200_000
    copies.give_back()
    for _ in range(2):
        snapshot.written()
        assert states.log == ["hold", "let go"]


def test_held_states_that_change_are_told_and_let_go():
    state = torch.randn(100)
    states = States(state)
    states.check_unchanged = mock.Mock(side_effect=RuntimeError("they were written to"))
    snapshot = HeldSnapshot(HostCache(), states)
    snapshot.add(sources(other=torch.randn(100))).give_back()
    snapshot.start_late_copies()
    snapshot.written()
    assert states.log == []  # nothing of them was asked for

    snapshot = HeldSnapshot(HostCache(), states)
    snapshot.add(sources(state=state))
    snapshot.start_late_copies()
    refused(RuntimeError, "they were written to", snapshot.written)
    assert states.log == ["hold", "let go"]

"""Host memory for snapshots: taken once, used again by the next save, bounded."""

import threading

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.host.cpu import usable_cores

_ALIGNED = 64  # bytes; every dtype may start there
_ROUNDED = 1 << 16  # sizes of blocks: the next save's file is a few bytes longer and shall find room in the same block


def _round_up(bytes, multiple):
    return -(-bytes // multiple) * multiple


def _threads():
    return min(8, len(usable_cores()))


class Block:
    """``memory``: a 1-D uint8 tensor whose pages are all in place."""

    def __init__(self, bytes, pinned):
        self.bytes = bytes
        if pinned:
            self.memory = torch.empty(bytes, dtype=torch.uint8, pin_memory=True)
        else:
            self.memory = torch.frombuffer(_C.io.HostMemory(bytes, _threads()), dtype=torch.uint8)


class HostCopy:
    """A tensor's elements in a block: stands for a ``StoredTensor`` whose tensor may change."""

    device_type = "cpu"

    def __init__(self, address, bytes):
        self.address, self.bytes = address, bytes

    def pieces(self, staging):
        if self.bytes:
            yield self.address, self.bytes

    def in_place(self):
        return True


class HostCache:
    """At most ``limit_bytes`` of blocks (None: no bound), in use or waiting to be used again. Safe for threads."""

    def __init__(self, limit_bytes=None):
        self.limit_bytes = limit_bytes
        self.held_bytes = 0  # by blocks, used or free
        self.peak_bytes = 0
        self._free = []
        self._changed = threading.Condition()

    def fits(self, bytes):
        return self.limit_bytes is None or _round_up(bytes, _ROUNDED) <= self.limit_bytes

    def has_room(self, bytes):
        """Whether ``take`` would not wait."""
        with self._changed:
            free = sum(block.bytes for block in self._free)
            rounded = _round_up(max(bytes, 1), _ROUNDED)
            return self.limit_bytes is None or self.held_bytes - free + rounded <= self.limit_bytes

    def take(self, bytes, pinned=False):
        """A block of at least ``bytes``, which must fit; waits while others hold too much."""
        bytes = _round_up(max(bytes, 1), _ROUNDED)
        with self._changed:
            while True:
                block = self._reuse(bytes, pinned)
                if block is not None:
                    return block
                if self._make_room(bytes):
                    self.held_bytes += bytes
                    break
                self._changed.wait()
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        try:
            return Block(bytes, pinned)
        except BaseException:
            with self._changed:
                self.held_bytes -= bytes
                self._changed.notify_all()
            raise

    def _reuse(self, bytes, pinned):
        fitting = [b for b in self._free if bytes <= b.bytes <= 2 * bytes and b.memory.is_pinned() == pinned]
        if not fitting:
            return None
        block = min(fitting, key=lambda b: b.bytes)
        self._free.remove(block)
        return block

    def _make_room(self, bytes):
        """Lets go of free blocks as far as that makes room. Returns whether there is room."""
        if self.limit_bytes is None:
            return True
        free = sum(block.bytes for block in self._free)
        if self.held_bytes - free + bytes > self.limit_bytes:
            return False
        while self.held_bytes + bytes > self.limit_bytes:
            self.held_bytes -= self._free.pop(0).bytes
        return True

    def release(self):
        """Gives memory that nobody uses back to the system."""
        with self._changed:
            self.held_bytes -= sum(block.bytes for block in self._free)
            self._free.clear()
            self._changed.notify_all()

    def give_back(self, block):
        with self._changed:
            self._free.append(block)
            self._changed.notify_all()


def bytes_of(sources):
    """Bytes of a block that takes copies of all ``sources``."""
    return sum(_round_up(source.bytes, _ALIGNED) for source in sources)


def on_device(sources):
    return any(source.device_type == "cuda" for source in sources)


def copy_into(block, sources):
    """Copies what ``sources`` hold now. Returns ``HostCopy``s in the same order."""
    made, triples, at, waits = [], [], 0, False
    start = block.memory.data_ptr()
    for source in sources:
        made.append(HostCopy(start + at, source.bytes))
        if not source.bytes:
            continue
        if source.in_place():
            inner = start + at
            for address, bytes in source.pieces(None):
                triples.append((address, inner, bytes))
                inner += bytes
        else:
            source.copy_to(block.memory[at : at + source.bytes])
            waits = waits or source.device_type == "cuda"
        at += _round_up(source.bytes, _ALIGNED)
    _C.io.copy_all(triples, _threads())
    if waits:
        get_accelerator().synchronize()
    return made

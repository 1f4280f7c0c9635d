"""Host memory for snapshots: taken once, used again by the next save, bounded."""

import functools
import threading

import torch

from deepspeed._native import _C
from deepspeed.host.cpu import usable_cores

_ROUNDED = 1 << 16  # sizes of blocks: the next save's file is a few bytes longer and shall find room in the same block


def round_up(bytes, multiple):
    return -(-bytes // multiple) * multiple


def copy_threads():
    return min(8, len(usable_cores()))


class Block:
    """``bytes`` of host memory, found when first asked for its ``memory``."""

    def __init__(self, bytes, pinned):
        self.bytes, self.pinned = bytes, pinned

    @functools.cached_property
    def memory(self):
        """A 1-D uint8 tensor whose pages are all in place. RuntimeError when the memory is not there."""
        if self.pinned:
            return torch.empty(self.bytes, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(_C.io.HostMemory(self.bytes, copy_threads()), dtype=torch.uint8)


class HostCache:
    """At most ``limit_bytes`` of blocks (None: no bound), in use or waiting to be used again. Safe for threads."""

    def __init__(self, limit_bytes=None):
        self.limit_bytes = limit_bytes
        self.held_bytes = 0  # by blocks, used or free
        self.peak_bytes = 0
        self._free = []
        self._changed = threading.Condition()

    def fits(self, bytes):
        return self.limit_bytes is None or round_up(bytes, _ROUNDED) <= self.limit_bytes

    def has_room(self, bytes):
        """Whether ``take`` would not wait."""
        with self._changed:
            free = sum(block.bytes for block in self._free)
            rounded = round_up(max(bytes, 1), _ROUNDED)
            return self.limit_bytes is None or self.held_bytes - free + rounded <= self.limit_bytes

    def take(self, bytes, pinned=False):
        """A block of at least ``bytes``, which must fit; waits while others hold too much. One that was in use before
        has its memory already."""
        bytes = round_up(max(bytes, 1), _ROUNDED)
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
        return Block(bytes, pinned)

    def _reuse(self, bytes, pinned):
        fitting = [b for b in self._free if bytes <= b.bytes <= 2 * bytes and b.pinned == pinned]
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

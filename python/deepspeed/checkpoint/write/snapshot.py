"""Copies of what goes into a checkpoint, in host memory: taken at once, or, of what only the engine changes, by the
time it wants to.

[Note: late copies] Weights can be written to by anybody as soon as a save returns. Masters and optimizer states change
in ``engine.step`` and few other calls, so they are copied while the forward and backward pass of the next step run, and
those calls wait until it is done. Source: Maurya et al., "DataStates-LLM: Lazy Asynchronous Checkpointing for Large
Language Models" (HPDC 2024).
"""

import bisect
import concurrent.futures
import dataclasses
import functools
import math
import os
import threading
import weakref

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.host.cpu import usable_cores

# ---- host cache ----------------------------------------------------------------------------------------------------
# Host memory for snapshots: taken once, used again by the next save, bounded.

_ALIGNED = 64  # bytes; every dtype may start there
_ROUNDED = 1 << 16  # sizes of blocks: the next save's file is a few bytes longer and shall find room in the same block


def round_up(bytes, multiple):
    return -(-bytes // multiple) * multiple


def copy_threads():
    return min(8, len(usable_cores()))


class Block:
    """``bytes`` of host memory, found when first asked for its ``memory``. ``users``: how many need what is in it."""

    def __init__(self, bytes, pinned):
        self.bytes, self.pinned, self.users = bytes, pinned, 0

    @functools.cached_property
    def memory(self):
        """A 1-D uint8 tensor whose pages are all in memory. RuntimeError when the memory is not there."""
        if self.pinned:
            return torch.empty(self.bytes, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(_C.io.HostMemory(self.bytes, copy_threads()), dtype=torch.uint8)

    @property
    def address(self):
        return self.memory.data_ptr()


class InPlace:
    """This class stands for a block where nothing is copied: offsets in it are addresses."""

    address = 0


class HostCache:
    """At most ``limit_bytes`` of blocks (None: no bound), in use or waiting to be used again. Safe for threads."""

    def __init__(self, limit_bytes=None):
        self.limit_bytes, self._bound = limit_bytes, math.inf if limit_bytes is None else limit_bytes
        self.held_bytes = self.peak_bytes = 0  # of blocks, used or free
        self._free = []
        self._changed = threading.Condition()

    def fits(self, bytes):
        return round_up(bytes, _ROUNDED) <= self._bound

    def has_room(self, bytes):
        """Whether ``take`` would not wait, even if no free block is large enough."""
        with self._changed:
            used = self.held_bytes - sum(block.bytes for block in self._free)
            return used + round_up(max(bytes, 1), _ROUNDED) <= self._bound

    def take(self, bytes, pinned=False):
        """A block of at least ``bytes``, which must fit, with one user; waits while others hold too much. One that was
        in use before has its memory already."""
        bytes = round_up(max(bytes, 1), _ROUNDED)

        def fitting():
            return [b for b in self._free if bytes <= b.bytes <= 2 * bytes and b.pinned == pinned]

        with self._changed:
            self._changed.wait_for(lambda: fitting() or self.has_room(bytes))
            block = min(fitting(), key=lambda b: b.bytes, default=None)
            if block is not None:
                self._free.remove(block)
            else:
                while self.held_bytes + bytes > self._bound:
                    self.held_bytes -= self._free.pop(0).bytes
                block = Block(bytes, pinned)
                self.held_bytes += bytes
                self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            block.users = 1
        return block

    def share(self, blocks):
        """Each of them has one more user."""
        with self._changed:
            for block in blocks:
                block.users += 1

    def give_back(self, *blocks):
        """Each has one user less; one without users can be taken again."""
        with self._changed:
            for block in blocks:
                block.users -= 1
                if not block.users:
                    self._free.append(block)
            self._changed.notify_all()

    def release(self):
        """Gives unused memory back to the system."""
        with self._changed:
            self.held_bytes -= sum(block.bytes for block in self._free)
            self._free.clear()
            self._changed.notify_all()


# ---- snapshot ------------------------------------------------------------------------------------------------------


class MemoryRanges:
    """Ranges of addresses, each with a value. Of two that overlap, the one that begins later is found."""

    def __init__(self):
        self._entries = []

    def _behind(self, address):
        return bisect.bisect_right(self._entries, address, key=lambda entry: entry[0])

    def add(self, address, bytes, value=None):
        self._entries.insert(self._behind(address), (address, bytes, value))

    def find(self, address, bytes):
        """(start of the range, its value) of one that holds all of it, or None."""
        at = self._behind(address)
        start, size, value = self._entries[at - 1] if at else (0, 0, None)
        return (start, value) if address + bytes <= start + size else None


@dataclasses.dataclass
class Plan:
    """The positions of the bytes of one file's sources. ``parts``: for each source [(block or None for the file's own,
    offset, bytes)]. ``bytes``: of the file's own block. ``now``, ``late``: [(address, offset, bytes)]; ``by_torch``:
    [(source, offset)] of sources that are on a device or have gaps."""

    parts: list = dataclasses.field(default_factory=list)
    bytes: int = 0
    now: list = dataclasses.field(default_factory=list)
    late: list = dataclasses.field(default_factory=list)
    by_torch: list = dataclasses.field(default_factory=list)

    def put(self, bytes):
        self.bytes += round_up(bytes, _ALIGNED)
        return self.bytes - round_up(bytes, _ALIGNED)


class FileCopies:
    """Stands for the sources of one file, in the same order: ``ranges`` are [(block, offset, bytes)] of each.
    ``late``: futures of the copies that are made later."""

    def __init__(self, cache, ranges, late):
        self._cache, self._ranges, self._late = cache, ranges, late
        self._blocks = list({block for part in ranges for block, _, _ in part} - {InPlace})
        cache.share(self._blocks)

    @property
    def sources(self):
        """Over the copies, which are there after ``wait``."""
        return [
            _C.prepared.memory_source(
                [(block.address + offset, bytes) for block, offset, bytes in ranges], self._blocks
            )
            for ranges in self._ranges
        ]

    def wait(self):
        """Until all copies are there. Raises what went wrong."""
        for made in self._late:
            made.result()

    def give_back(self):
        """The file is written, or given up."""
        self._cache.give_back(*self._blocks)
        self._blocks = []


class Snapshot:
    """The copies of one save on one rank. Memory that several files hold is copied once.

    ``cache``: a ``HostCache``. ``states``: ``HeldStates``, what may be copied late; None: nothing. The memory of all
    sources stays as it is until ``add`` returns, that of ``states`` until the end of the late copies.
    """

    def __init__(self, cache, states=None):
        self.cache, self.states = cache, states
        self._copied = MemoryRanges()
        self._late = []  # (future, block, [(address, offset in the block, bytes)]) of the late copies
        self._kept = []  # blocks in which later files may find what they hold

    # ---- in the calling thread -------------------------------------------------------------------------------------
    def plan(self, sources):
        """The ``Plan`` of the copies of ``sources``."""
        made = Plan()
        for source in sources:
            if source.bytes and not source.in_place():
                made.by_torch.append((source, made.put(source.bytes)))
                made.parts.append([(None, made.by_torch[-1][1], source.bytes)])
            else:
                made.parts.append([self._range(made, *piece) for piece in source.pieces()] if source.bytes else [])
        return made

    def _range(self, plan, address, bytes):
        found = self._copied.find(address, bytes)
        if found is not None:
            start, (block, offset) = found
            return block, offset + address - start, bytes
        offset = plan.put(bytes)
        late = self.states is not None and self.states.cover(address, bytes)
        (plan.late if late else plan.now).append((address, offset, bytes))
        return None, offset, bytes

    def add(self, sources):
        """Copies what can not wait. Returns ``FileCopies``, or None if all of the cache would be too small for them.
        Waits while it is full. RuntimeError when there is no memory."""
        plan, block = self.plan(sources), None
        if not self.cache.has_room(plan.bytes):  # waiting for room that we hold ourselves would never end
            self._forget()
            plan = self.plan(sources)
        if not self.cache.fits(plan.bytes):
            return None
        if plan.bytes:
            block = self.cache.take(plan.bytes, pinned=any(source.on_device for source, _ in plan.by_torch))
            try:
                self._copy(plan, block)
            except BaseException:
                self.cache.give_back(block)
                raise
            self._kept.append(block)
        ranges = [[(own or block, offset, bytes) for own, offset, bytes in part] for part in plan.parts]
        return FileCopies(self.cache, ranges, [made for made, *_ in self._late])

    def _forget(self):
        """Later files find nothing copied, and blocks are free when the files that are in them are written."""
        self._make_late_copies()
        self._copied = MemoryRanges()
        self._give_kept_back()

    def _give_kept_back(self):
        self.cache.give_back(*self._kept)
        self._kept = []

    def _copy(self, plan, block):
        for source, offset in plan.by_torch:
            source.copy_to(block.memory[offset : offset + source.bytes])
        if plan.now:
            _copy(block, plan.now)
        if block.pinned:
            get_accelerator().synchronize()
        for address, offset, bytes in plan.now + plan.late:
            self._copied.add(address, bytes, (block, offset))
        if plan.late:
            self._late.append((concurrent.futures.Future(), block, plan.late))

    def drop(self):
        """Late copies that were not made are given up."""
        for made, *_ in self._late:
            if not made.done():
                made.set_exception(RuntimeError("given up"))
        self._forget()

    # ---- late copies -----------------------------------------------------------------------------------------------
    def _make_late_copies(self):
        for made, block, parts in self._late:
            if made.done():
                continue
            try:
                if parts:
                    _copy(block, parts)
                    self.states.check_unchanged()
                made.set_result(None)
            except BaseException as error:
                made.set_exception(error)

    def start_late_copies(self):
        """See [Note: late copies]. The engine's states are held until they are made. Nothing can be added any more."""
        self._give_kept_back()
        if self._late:
            self._hold_states()
            threading.Thread(target=self._copy_late, name="deepspeed-snapshot", daemon=True).start()

    def _copy_late(self):
        try:
            self._make_late_copies()
        finally:
            self._let_states_go()

    def _hold_states(self):
        self.states.hold()
        _flying.add(self)

    def _let_states_go(self):
        _flying.discard(self)
        self.states.let_go()


class HeldSnapshot(Snapshot):
    """States are not copied at all: files are written from where they are, and the engine waits with changing them
    until ``written``. For files that are written as fast as a copy is made."""

    def __init__(self, cache, states):
        super().__init__(cache, states)
        self._late.append((concurrent.futures.Future(), None, ()))  # the time from which the states are held
        self._needed = False

    def _range(self, plan, address, bytes):
        if not self.states.cover(address, bytes):
            return super()._range(plan, address, bytes)
        self._needed = True
        return InPlace, address, bytes

    def start_late_copies(self):
        """The engine's states are held, and their files can be written. Nothing can be added any more."""
        self._give_kept_back()
        if self._needed:
            self._hold_states()
        self._make_late_copies()

    def written(self):
        """All files are written: the engine may change its states again. Raises if others did meanwhile."""
        if self in _flying:
            try:
                self.states.check_unchanged()
            finally:
                self._let_states_go()


def _copy(block, parts):
    start = block.address
    _C.io.copy_all([(address, start + offset, bytes) for address, offset, bytes in parts], copy_threads())


_flying = weakref.WeakSet()  # snapshots that hold states


def _in_a_forked_child():
    """The copying thread did not come along: the child's engine need not wait for it."""
    for snapshot in list(_flying):
        snapshot._let_states_go()


os.register_at_fork(after_in_child=_in_a_forked_child)

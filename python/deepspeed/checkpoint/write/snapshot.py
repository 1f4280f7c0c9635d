"""Copies of what goes into a checkpoint, in host memory: taken at once, or, of what only the engine changes, by the
time it wants to.

[Note: late copies] Weights can be written to by anybody as soon as a save returns. Masters and optimizer states change
in ``engine.step`` and few other calls, so they are copied while the forward and backward pass of the next step run, and
those calls wait until it is done. Source: Maurya et al., "DataStates-LLM: Lazy Asynchronous Checkpointing for Large
Language Models" (HPDC 2024).
"""

import bisect
import functools
import os
import threading
import weakref

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.host.cpu import usable_cores

# ---- host cache ----------------------------------------------------------------------------------------------------
# Host memory for snapshots: taken once, used again by the next save, bounded.

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

    @property
    def address(self):
        return self.memory.data_ptr()


class InPlace:
    """This class stands for a block where nothing is copied: offsets in it are addresses."""

    address = 0


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


# ---- snapshot ------------------------------------------------------------------------------------------------------

_ALIGNED = 64  # bytes; every dtype may start there


class MemoryRanges:
    """Ranges of addresses, each with a value. Of two that overlap, the one that begins later is found."""

    def __init__(self):
        self._starts, self._entries = [], []

    def add(self, address, bytes, value=None):
        at = bisect.bisect_right(self._starts, address)
        self._starts.insert(at, address)
        self._entries.insert(at, (address, bytes, value))

    def find(self, address, bytes):
        """(start of the range, its value) of one that holds all of it, or None."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start, size, value = self._entries[at]
        return (start, value) if address + bytes <= start + size else None


class Plan:
    """Where the bytes of one file's sources will be. ``parts``: for each source [(block or None for the file's own,
    offset, bytes)]. ``bytes``: of the file's own block. ``now``, ``late``: [(address, offset, bytes)]; ``by_torch``:
    [(source, offset)] of sources that are on a device or have gaps."""

    def __init__(self):
        self.parts, self.bytes = [], 0
        self.now, self.late, self.by_torch = [], [], []

    def put(self, bytes):
        offset = self.bytes
        self.bytes += round_up(bytes, _ALIGNED)
        return offset

    def from_device(self):
        return any(source.on_device for source, _ in self.by_torch)


class LateCopy:
    """What will be copied into ``block``. ``parts``: [(address, offset in the block, bytes)]. Without parts it is what
    files wait for that are written from the states themselves: the time from which the states are held."""

    def __init__(self, block=None, parts=()):
        self._block, self._parts = block, parts
        self._done = threading.Event()
        self._error = None

    def make(self, check):
        """``check()`` raises if what was copied was not what it should have been."""
        if not self._done.is_set():
            try:
                if self._parts:
                    _copy(self._block, self._parts)
                    check()
            except BaseException as error:
                self._error = error
            self._done.set()

    def give_up(self, error):
        self._error = self._error or error
        self._done.set()

    def wait(self):
        """Until it is made. Raises what went wrong."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class FileCopies:
    """What stands for the sources of one file, in the same order: ``places`` are [(block, offset, bytes)] of each."""

    def __init__(self, snapshot, places, blocks, late):
        self._snapshot, self._places, self._blocks, self._late = snapshot, places, blocks, late

    @property
    def sources(self):
        """Over the copies, which are there after ``wait``."""
        return [
            _C.prepared.memory_source(
                [(block.address + offset, bytes) for block, offset, bytes in places], self._blocks
            )
            for places in self._places
        ]

    def wait(self):
        """Until all copies are there. Raises what went wrong."""
        for copy in self._late:
            copy.wait()

    def give_back(self):
        """The file is written, or given up."""
        self._snapshot.give_back(self._blocks)
        self._blocks = []


class Snapshot:
    """The copies of one save on one rank. Memory that several files hold is copied once.

    ``cache``: a ``HostCache``. ``states``: ``HeldStates``, what may be copied late; None: nothing. The memory of all
    sources stays as it is until ``add`` returns, that of ``states`` until the end of the late copies.
    """

    def __init__(self, cache, states=None):
        self.cache, self.states = cache, states
        self._copied = MemoryRanges()
        self._late = []
        self._kept = []  # blocks in which later files may find what they hold
        self._users = {}  # block -> how many need it: files that are not written, and we while it is in _kept
        self._lock = threading.Lock()

    # ---- in the calling thread -------------------------------------------------------------------------------------
    def plan(self, sources):
        """Where copies of ``sources`` will be."""
        made = Plan()
        for source in sources:
            if not source.bytes:
                made.parts.append([])
            elif source.in_place():
                made.parts.append([self._place(made, *piece) for piece in source.pieces()])
            else:
                offset = made.put(source.bytes)
                made.by_torch.append((source, offset))
                made.parts.append([(None, offset, source.bytes)])
        return made

    def _place(self, plan, address, bytes):
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
        plan = self.plan(sources)
        if not self.cache.has_room(plan.bytes):  # waiting for room that we hold ourselves would never end
            self._forget()
            plan = self.plan(sources)
        if not self.cache.fits(plan.bytes):
            return None
        block = None
        if plan.bytes:
            block = self.cache.take(plan.bytes, pinned=plan.from_device())
        try:
            self._copy(plan, block)
        except BaseException:
            if block is not None:
                self.cache.give_back(block)
            raise
        if block is not None:
            self._use([block])
            self._kept.append(block)
        places = [[(own or block, offset, bytes) for own, offset, bytes in part] for part in plan.parts]
        used = {id(block): block for part in places for block, _, _ in part if block is not InPlace}
        used = list(used.values())
        self._use(used)
        return FileCopies(self, places, used, list(self._late))

    def _forget(self):
        """Later files find nothing copied, and blocks are free when the files that are in them are written."""
        self._make_late_copies()
        self._copied = MemoryRanges()
        self._give_kept_back()

    def _give_kept_back(self):
        self.give_back(self._kept)
        self._kept = []

    def _copy(self, plan, block):
        for source, offset in plan.by_torch:
            source.copy_to(block.memory[offset : offset + source.bytes])
        if plan.now:
            _copy(block, plan.now)
        if plan.from_device():
            get_accelerator().synchronize()
        for address, offset, bytes in plan.now + plan.late:
            self._copied.add(address, bytes, (block, offset))
        if plan.late:
            self._late.append(LateCopy(block, plan.late))

    def _use(self, blocks):
        with self._lock:
            for block in blocks:
                self._users[block] = self._users.get(block, 0) + 1

    def give_back(self, blocks):
        for block in blocks:
            with self._lock:
                self._users[block] -= 1
                free = self._users[block] == 0
            if free:
                self.cache.give_back(block)

    def drop(self):
        """Late copies that were not made are given up."""
        for copy in self._late:
            copy.give_up(RuntimeError("given up"))
        self._forget()

    # ---- late copies -----------------------------------------------------------------------------------------------
    def _make_late_copies(self):
        for copy in self._late:
            copy.make(self.states.check_unchanged)

    def start_late_copies(self):
        """See [Note: late copies]. The engine's states are held until they are made. Nothing can be added any more."""
        self._give_kept_back()
        if not self._late:
            return
        self.states.hold()
        _flying.add(self)
        threading.Thread(target=self._copy_late, name="deepspeed-snapshot", daemon=True).start()

    def _copy_late(self):
        try:
            self._make_late_copies()
        finally:
            _flying.discard(self)
            self.states.let_go()


class HeldSnapshot(Snapshot):
    """States are not copied at all: files are written from where they are, and the engine waits with changing them
    until ``written``. For files that are written as fast as a copy is made."""

    def __init__(self, cache, states):
        super().__init__(cache, states)
        self._late.append(LateCopy())
        self._needed = self._held = False

    def _place(self, plan, address, bytes):
        if self.states.cover(address, bytes):
            self._needed = True
            return InPlace, address, bytes
        return super()._place(plan, address, bytes)

    def start_late_copies(self):
        """The engine's states are held, and their files can be written. Nothing can be added any more."""
        self._give_kept_back()
        if self._needed:
            self.states.hold()
            self._held = True
            _flying.add(self)
        self._make_late_copies()

    def written(self):
        """All files are written: the engine may change its states again. Raises if others did meanwhile."""
        if self._held:
            self._held = False
            try:
                self.states.check_unchanged()
            finally:
                _flying.discard(self)
                self.states.let_go()


def _copy(block, parts):
    start = block.address
    _C.io.copy_all([(address, start + offset, bytes) for address, offset, bytes in parts], copy_threads())


_flying = weakref.WeakSet()


def _in_a_forked_child():
    """The copying thread did not come along: the child's engine need not wait for it."""
    for snapshot in list(_flying):
        snapshot.states.let_go()
    _flying.clear()


os.register_at_fork(after_in_child=_in_a_forked_child)

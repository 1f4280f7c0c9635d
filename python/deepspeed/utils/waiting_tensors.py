"""Tensors that wait for backward in host memory or in files: csrc/storage/tensor_store.h moves them."""

import collections
import os
import weakref

import torch

from deepspeed._native import _C
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.mesh import made_here


class Waiting:
    """A copy of ``tensor`` that waits in ``store``, for as long as this object is here."""

    __slots__ = ("number", "store")

    def __init__(self, store, tensor):
        self.store, self.number = store, -1
        self.number = store.put(tensor)

    def get(self):
        """A copy on the device."""
        return self.store.get(self.number)

    def prefetch(self):
        """It is the next to be asked for."""
        self.store.prefetch(self.number)

    def __del__(self):
        self.store.drop(self.number)


class BackwardOrder:
    """The order in which saved tensors leave and come back. ``add`` yields all objects that stand for them but the
    latest ``stay``; ``next_back`` gives the one that backward, which begins with the latest, needs next. The order
    holds weak references only."""

    def __init__(self, stay=1):
        self.stay, self.latest, self.waiting = stay, collections.deque(), []

    def add(self, saved):
        """Yields those that leave now."""
        self.latest.append(weakref.ref(saved))
        while len(self.latest) > self.stay:
            oldest = self.latest.popleft()()
            if oldest is not None:
                self.waiting.append(weakref.ref(oldest))
                yield oldest

    def next_back(self, current=None):
        """The latest one that waits, besides ``current``, which has come back; None if there is none."""
        while self.waiting:
            found = self.waiting[-1]()
            if found is not None and found is not current:
                return found
            self.waiting.pop()
        return None


class ShapeStore:
    """A store of tensors of the device ``meta``, which have no values. It has of the device what a ``TensorStore`` has
    whose writes are slow. ``allocate``: of bytes; where its memory is counted."""

    def __init__(self, allocate=None):
        self.kept = {}  # number -> (shape, dtype, bytes)
        self.next = self.largest = 0
        self.copies, self.held = collections.deque(), 0  # (bytes, memory), on their way or idle, the oldest first
        self.allocate = allocate or (lambda size: torch.empty(size, dtype=torch.uint8, device="meta"))

    def put(self, tensor):
        self.next += 1
        size = tensor.numel() * tensor.element_size()
        self.kept[self.next] = tensor.shape, tensor.dtype, size
        self._copy(size, again=False)
        return self.next

    def get(self, number):
        shape, dtype, size = self.kept[number]
        self._copy(size)
        return torch.empty(shape, dtype=dtype, device="meta")

    def prefetch(self, number):
        self._copy(self.kept[number][2])

    def drop(self, number):
        self.kept.pop(number, None)

    def _copy(self, size, again=True):
        """``again``: in the memory of an earlier one, where that is as large."""
        wanted = _C.TensorStore.copy_bytes(size)
        if size == 0 or (again and any(one == wanted for one, _ in self.copies)):
            return
        self.largest = max(self.largest, size)
        room = _C.TensorStore.room(self.largest) - wanted
        while self.copies and self.held > room:
            self.held -= self.copies.popleft()[0]
        self.copies.append((wanted, self.allocate(wanted)))
        self.held += wanted


def store_of(device, offload):
    """The store in which tensors of ``device`` wait, one for each position in a job; None if they stay on the device.
    ``offload``: False; True for host memory (tensors of the CPU stay); a text for files in that folder; or a
    ``ShapeStore``. Tensors of the device ``meta`` count as tensors of this machine's device."""
    if isinstance(offload, ShapeStore):
        return offload
    folder = offload if isinstance(offload, str) else None
    on_host = (get_accelerator().device_name() if device.type == "meta" else device.type) == "cpu"
    if not offload or (on_host and folder is None):
        return None
    if device.type == "meta":
        return ShapeStore()
    stores, key = made_here().stores, (str(device), folder)
    if key not in stores:
        stores[key] = _open(device, folder)
    return stores[key]


def _open(device, folder):
    if folder is None:
        return _C.TensorStore(device, _C.Placement("host", get_accelerator().device_name() != "cpu"))
    os.makedirs(folder, exist_ok=True)
    return _C.TensorStore(device, _C.Placement("file", False, folder))

"""Tensors that wait for backward in host memory or in files: csrc/storage/tensor_store.h moves them."""

import collections
import os
import weakref

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


def store_of(device, offload):
    """The store in which tensors of ``device`` wait, one for each position in a job; None if they stay on the device.
    ``offload``: False; True for host memory (tensors that are there stay); a text for files in that folder."""
    folder = offload if isinstance(offload, str) else None
    if not offload or (folder is None and get_accelerator()._on_host(device)):
        return None
    stores, key = made_here().stores, (str(device), folder)
    if key not in stores:
        stores[key] = _open(device, folder)
    return stores[key]


def _open(device, folder):
    if folder is None:
        return _C.TensorStore(device, _C.Placement("host", get_accelerator().device_name() != "cpu"))
    if device.type != "meta":  # of a planned step, which writes nothing
        os.makedirs(folder, exist_ok=True)
    return _C.TensorStore(device, _C.Placement("file", False, folder))

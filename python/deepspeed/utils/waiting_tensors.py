"""Tensors that wait for backward in host memory or in files: csrc/storage/tensor_store.h moves them."""

import os

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


class _Shapes:
    """A store of tensors of the device ``meta``, which have no values."""

    def __init__(self):
        self.kept = {}
        self.next = 0

    def put(self, tensor):
        self.next += 1
        self.kept[self.next] = tensor.shape, tensor.dtype
        return self.next

    def get(self, number):
        shape, dtype = self.kept[number]
        return torch.empty(shape, dtype=dtype, device="meta")

    def prefetch(self, number):
        pass

    def drop(self, number):
        self.kept.pop(number, None)


def store_of(device, offload):
    """Where tensors of ``device`` wait, one store for each place in a job; None where they stay. ``offload``: False;
    True: host memory, which is no other place for tensors of the CPU; a text: files in that folder."""
    folder = offload if isinstance(offload, str) else None
    if not offload or (device.type == "cpu" and folder is None):
        return None
    stores, key = made_here().stores, (str(device), folder)
    if key not in stores:
        stores[key] = _Shapes() if device.type == "meta" else _open(device, folder)
    return stores[key]


def _open(device, folder):
    if folder is None:
        return _C.TensorStore(device, _C.Placement("host", get_accelerator().device_name() != "cpu"))
    os.makedirs(folder, exist_ok=True)
    return _C.TensorStore(device, _C.Placement("file", False, folder))

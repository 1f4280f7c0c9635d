"""Reads files of torch.save without running code, and tensor by tensor when asked to.

Both formats: the zip of torch 1.6 and later, and the older stream of pickles. Storages are read by offset, of the bytes
that are asked for, on every torch. What is let through: the table of ``csrc/formats`` and ``plain_classes``.
"""

import os

import torch

from deepspeed._native import _C
from deepspeed.formats import standalone_reader
from deepspeed.formats.archive_values import STATE_RULES, VALUES
from deepspeed.formats.byte_ranges import DeflatedRange, FileRange
from deepspeed.formats.lazy_tensor import LazyTensor, StoredMemory
from deepspeed.formats.plain_classes import Names
from deepspeed.formats.standalone_reader import RefusedClass, trusts_pickles
from deepspeed.host import cpu

__all__ = ["LazyTensor", "RefusedClass", "load", "trusts_pickles"]

DTYPES = {str(dtype)[6:]: dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def load(path, lazy=False, allow=(), trust=None):
    """The value that torch.save wrote to ``path``, on the CPU. With ``lazy``, tensors are LazyTensors that stay in the
    file.

    allow: classes, functions or their names ("module.name") that are let through beyond tensors and plain data.
    trust: True runs whatever the pickle asks for; None asks the environment variable DS_CHECKPOINT_TRUST.
    Raises RefusedClass (a pickle.UnpicklingError) for a name that is not let through, pickle.UnpicklingError or
    zipfile.BadZipFile for a file that is damaged or no such file, OSError.
    """
    path = os.fspath(path)
    if trusts_pickles() if trust is None else trust:
        return standalone_reader.load(path, lazy, True)
    open(path, "rb").close()  # errors in the words of Python
    names = Names(path, allow, STATE_RULES)
    archive = _C.formats.TorchArchive(path, names)
    return archive.load(names, VALUES[lazy], _Storages(path, archive, lazy))


_LARGE = 1 << 20


def _threads():
    return min(8, len(cpu.usable_cores()))


class LargeRange(FileRange):
    """Reads a large range on several threads, into memory in huge pages."""

    def read_into(self, target, start):
        if target.numel() < _LARGE or start < 0 or start + target.numel() > self.bytes:
            return super().read_into(target, start)
        _C.formats.read_ranges(
            self.path, self.identity, [(self.offset + start, target.numel(), target.data_ptr())], _threads()
        )


class _Storages:
    """The storages of one archive, by their numbers, and the tensors over them."""

    def __init__(self, path, archive, lazy):
        self.path, self.archive, self.lazy, self.memories = path, archive, lazy, []

    def prepare(self, records):
        """``records``: (dtype, offset, bytes, name of a packed record or None) of each storage."""
        for dtype, offset, size, record in records:
            if record is None:
                source = LargeRange(self.path, offset, size, self.archive.identity)
            else:
                source = DeflatedRange(self.path, record, size, self.archive.identity)
            self.memories.append(StoredMemory(source, DTYPES[dtype], self.archive.swapped))
        if not self.lazy:  # storages that are in the file as they are, in one pass on several threads
            plain = [m for m in self.memories if isinstance(m.source, LargeRange) and not m.swapped]
            ranges = [(m.source.offset, m.source.bytes, m.allocate().data_ptr()) for m in plain]
            _C.formats.read_ranges(self.path, self.archive.identity, ranges, _threads())

    def tensor(self, storage, dtype, offset, shape, stride, requires_grad):
        memory = self.memories[storage]
        found = LazyTensor(memory.viewed_as(DTYPES[dtype]), offset, shape, stride, requires_grad)
        return found if self.lazy else found.share().requires_grad_(requires_grad)

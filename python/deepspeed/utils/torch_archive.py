"""Reads files of torch.save without running code, and tensor by tensor when asked to.

Both formats: the zip of torch 1.6 and later, and the older stream of pickles. Storages are read by offset, of the bytes
that are asked for, on every torch. What is let through: ``deepspeed.utils.pickle_table`` and ``pickle_tensors``.
"""

import io
import mmap
import os
import pickle
import sys

from deepspeed.utils.byte_ranges import FileRange, file_identity, read_bytes
from deepspeed.utils.lazy_tensor import LazyTensor, StoredMemory, itemsize
from deepspeed.utils.pickle_machine import Machine, RefusedClass
from deepspeed.utils.pickle_tensors import TensorRules, persistent_storage, table_of
from deepspeed.utils.zip_directory import ZipDirectory

__all__ = ["LazyTensor", "RefusedClass", "load", "trusts_pickles"]

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
_MOST_PACKED_PICKLE = 1 << 30


def trusts_pickles():
    """Whether the environment variable DS_CHECKPOINT_TRUST lets every pickle do as it pleases."""
    return os.environ.get("DS_CHECKPOINT_TRUST", "").strip().lower() in ("1", "true", "yes", "on")


def load(path, lazy=False, allow=(), trust=None):
    """What torch.save wrote to ``path``, on the CPU. With ``lazy``, tensors are LazyTensors that stay in the file.

    allow: classes, functions or their names ("module.name") that are let through beyond tensors and plain data.
    trust: True runs whatever the pickle asks for; None asks the environment variable DS_CHECKPOINT_TRUST.
    Raises RefusedClass (a pickle.UnpicklingError) for a name that is not let through, pickle.UnpicklingError or
    zipfile.BadZipFile for a file that is damaged or no such file, OSError.
    """
    path = os.fspath(path)
    trust = trusts_pickles() if trust is None else trust
    with open(path, "rb") as file:
        start = file.read(4)
    read = _load_zip if start[:2] == b"PK" else _load_legacy
    return read(path, lazy, allow, trust)


def _run_pickle(data, path, lazy, allow, trust, memory_of, position=0):
    """The object of a pickle, and the position behind it."""
    persistent = persistent_storage(memory_of)
    if trust:
        reader = io.BytesIO(data)
        reader.seek(position)
        trusting = _Trusting(reader, TensorRules(lazy), persistent)
        return trusting.load(), reader.tell()
    machine = Machine(data, table_of(path, lazy, allow), persistent, position)
    return machine.run(), machine.position


class _Trusting(pickle.Unpickler):
    """Python's own machine, for files that may run code; only tensors are made as everywhere here."""

    def __init__(self, file, rules, persistent):
        super().__init__(file, encoding="utf-8")
        self._rules, self.persistent_load = rules.tensor_functions(), persistent

    def find_class(self, module, name):
        return self._rules[module, name] if (module, name) in self._rules else super().find_class(module, name)


def _damaged(path, what):
    return pickle.UnpicklingError(f"{path} is damaged or no file of torch.save: {what}")


def _checked_memory(path, key, source, dtype, numel, swapped):
    if numel * itemsize(dtype) > source.bytes:
        raise _damaged(path, f"the storage {key!r} has {source.bytes} bytes, not {numel} elements of {dtype}")
    source.bytes = numel * itemsize(dtype)
    return StoredMemory(source, dtype, swapped)


def _load_zip(path, lazy, allow, trust):
    directory = ZipDirectory(path)
    roots = [
        name[: -len("data.pkl")] for name in directory.names if name.count("/") == 1 and name.endswith("/data.pkl")
    ]
    if len(roots) != 1:
        raise _damaged(path, f"it has {len(roots)} records data.pkl")
    root = roots[0]
    if f"{root}constants.pkl" in directory:
        raise _damaged(path, "it is a TorchScript program; load it with torch.jit.load")
    structure = directory.range_of(f"{root}data.pkl")
    if structure.bytes > _MOST_PACKED_PICKLE and not isinstance(structure, FileRange):
        raise _damaged(path, f"its packed structure grows to {structure.bytes} bytes")
    order = f"{root}byteorder"
    swapped = order in directory and read_bytes(directory.range_of(order)) != sys.byteorder.encode()
    memories = {}

    def memory_of(key, dtype, numel):
        if key not in memories:
            source = directory.range_of(f"{root}data/{key}")
            memories[key] = _checked_memory(path, key, source, dtype, numel, swapped)
        if (memories[key].dtype, memories[key].numel) != (dtype, numel):
            raise _damaged(path, f"the storage {key!r} is of two kinds")
        return memories[key]

    data = read_bytes(structure)
    return _run_pickle(data, path, lazy, allow, trust, memory_of)[0]


def _load_legacy(path, lazy, allow, trust):
    """Five pickles: magic, version, system, object, keys of storages; then each storage, after its numel."""
    with open(path, "rb") as file:
        identity = file_identity(file.fileno())
        if identity[2] == 0:
            raise _damaged(path, "it is empty")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    ranges, memories = {}, {}

    def memory_of(key, dtype, numel):
        if key not in memories:
            if numel * itemsize(dtype) > len(data):
                raise _damaged(path, f"the storage {key!r} is larger than the file")
            ranges[key] = FileRange(path, None, numel * itemsize(dtype), identity)
            memories[key] = StoredMemory(ranges[key], dtype, swapped)
        if (memories[key].dtype, memories[key].numel) != (dtype, numel):
            raise _damaged(path, f"the storage {key!r} is of two kinds")
        return memories[key]

    def plain(position):
        return _run_pickle(data, path, True, (), False, memory_of, position)

    try:
        magic, position = plain(0)
        if type(magic) is not int or magic != _LEGACY_MAGIC:
            raise _damaged(path, "it does not begin as one")
    except RefusedClass:
        raise
    except pickle.UnpicklingError as error:
        raise _damaged(path, "it does not begin as one") from error
    version, position = plain(position)
    system, position = plain(position)
    if version != _LEGACY_VERSION or type(system) is not dict:
        raise _damaged(path, "it is of an unknown version")
    swapped = (system.get("little_endian", True) is True) != (sys.byteorder == "little")
    start = position
    found, position = _run_pickle(data, path, True, allow, trust, memory_of, start)
    keys, position = plain(position)
    if type(keys) is not list or set(map(str, keys)) != set(ranges) or len(keys) != len(ranges):
        raise _damaged(path, "its storages are not those that its tensors name")
    for key in keys:
        if position + 8 > len(data):
            raise _damaged(path, "it is cut off")
        numel = int.from_bytes(data[position : position + 8], "little" if not swapped else "big")
        if numel != memories[key].numel or position + 8 + ranges[key].bytes > len(data):
            raise _damaged(path, f"the storage {key!r} is cut off or of another size")
        ranges[key].offset = position + 8
        position += 8 + ranges[key].bytes
    return found if lazy else _run_pickle(data, path, False, allow, trust, memory_of, start)[0]

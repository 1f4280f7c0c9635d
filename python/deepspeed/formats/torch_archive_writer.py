"""Writes tensors in torch.save's format, chunk by chunk: no tensor is ever whole in memory.

The zip holds stored records whose data begin at multiples of 64 bytes, as torch's own do; any torch since 1.6 reads it.
"""

import collections
import io
import os
import pickle
import struct
import sys
import zlib

import torch

from deepspeed.formats.byte_ranges import memory_of, write_tensor
from deepspeed.formats.lazy_tensor import itemsize, row_major

_ROOT = "archive"
_DATA_ALIGNMENT = 64
_FULL = 0xFFFFFFFF
_PADDING = 0x4246  # "FB", the field that torch fills with padding
_STORAGE_NAMES = {torch.float64: "DoubleStorage", torch.float32: "FloatStorage", torch.float16: "HalfStorage",
                  torch.bfloat16: "BFloat16Storage", torch.int64: "LongStorage", torch.int32: "IntStorage",
                  torch.int16: "ShortStorage", torch.int8: "CharStorage", torch.uint8: "ByteStorage",
                  torch.bool: "BoolStorage", torch.complex64: "ComplexFloatStorage",
                  torch.complex128: "ComplexDoubleStorage"}  # fmt: skip


class _StorageKey:
    """The storage of one weight, in a pickle: torch's persistent id."""

    def __init__(self, key, weight):
        name = _STORAGE_NAMES.get(weight.dtype, "UntypedStorage")
        kind = getattr(torch if weight.dtype in _STORAGE_NAMES else torch.storage, name)
        numel = weight.shape.numel() * (1 if weight.dtype in _STORAGE_NAMES else itemsize(weight.dtype))
        self.pid = ("storage", kind, str(key), "cpu", numel)


class _StructurePickler(pickle.Pickler):
    """Weights and tensors become the tensors that torch rebuilds; their storages are collected in ``weights``."""

    def __init__(self, file, as_weight):
        super().__init__(file, 2)
        self.weights, self._as_weight, self._kept = [], as_weight, []

    def persistent_id(self, value):
        return value.pid if isinstance(value, _StorageKey) else None

    def reducer_override(self, value):
        weight = self._as_weight(value)
        if weight is None:
            return NotImplemented
        self._kept.append(value)  # what pickle remembers by its id must live on
        storage = _StorageKey(len(self.weights), weight)
        self.weights.append(weight)
        shape = tuple(weight.shape)
        arguments = (storage, 0, shape, row_major(shape), False, collections.OrderedDict())
        if weight.dtype in _STORAGE_NAMES:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, weight.dtype)


def write_torch_stream(path, value, as_weight):
    """Writes ``value``, any structure of plain data, to ``path``.

    as_weight(item): None, or what has the ``shape``, the ``dtype`` and the ``chunks()`` (1-D uint8 tensors on the CPU)
    of a tensor in the structure. It is asked once for each object; an object that occurs twice is one tensor again.
    """
    structure = io.BytesIO()
    pickler = _StructurePickler(structure, as_weight)
    pickler.dump(value)
    with open(path, "wb", buffering=0) as file:
        archive = _ZipWriter(file)
        archive.add("data.pkl", [_bytes_tensor(structure.getvalue())], len(structure.getvalue()))
        archive.add("byteorder", [_bytes_tensor(sys.byteorder.encode())], len(sys.byteorder))
        for key, weight in enumerate(pickler.weights):
            archive.add(f"data/{key}", weight.chunks(), weight.shape.numel() * itemsize(weight.dtype))
        archive.add("version", [_bytes_tensor(b"3\n")], 2)
        archive.finish()
        os.fsync(file.fileno())


def _bytes_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _ZipWriter:
    """Stored records, one after the other (PKWARE APPNOTE 6.3). Checksums are filled in when the data are known."""

    def __init__(self, file):
        self.file, self.entries, self.position = file, [], 0

    def _write(self, data):
        self.file.write(data)
        self.position += len(data)

    def add(self, name, chunks, size):
        """A record of ``size`` bytes. ValueError when the chunks are not that many."""
        name = f"{_ROOT}/{name}".encode()
        header = self.position
        extra = struct.pack("<2H2Q", 1, 16, size, size) if size >= _FULL else b""
        padding = -(header + 30 + len(name) + len(extra) + 4) % _DATA_ALIGNMENT
        extra += struct.pack("<2H", _PADDING, padding) + b"Z" * padding
        short = min(size, _FULL)
        self._write(
            struct.pack("<4s5H3L2H", b"PK\x03\x04", 45, 0x800, 0, 0, 0x21, 0, short, short, len(name), len(extra))
        )
        self._write(name + extra)
        checksum, done = 0, 0
        for chunk in chunks:
            write_tensor(self.file, chunk)
            checksum = zlib.crc32(memory_of(chunk) if chunk.numel() else b"", checksum)
            done += chunk.numel()
        if done != size:
            raise ValueError(f"the record {name.decode()} has {done} bytes instead of {size}")
        os.pwrite(self.file.fileno(), struct.pack("<L", checksum), header + 14)
        self.position += size
        self.entries.append((name, checksum, size, header))

    def finish(self):
        """The directory."""
        start = self.position
        for name, checksum, size, header in self.entries:
            large = [value for value in (size, size, header) if value >= _FULL]
            extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
            short = min(size, _FULL)
            self._write(
                struct.pack(
                    "<4s6H3L5H2L", b"PK\x01\x02", 45, 45, 0x800, 0, 0, 0x21, checksum, short, short, len(name),
                    len(extra), 0, 0, 0, 0, min(header, _FULL),
                ) + name + extra
            )  # fmt: skip
        size, end, count = self.position - start, self.position, len(self.entries)
        if count >= 0xFFFF or start >= _FULL or size >= _FULL:
            self._write(
                struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
                + struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
            )
        short = min(count, 0xFFFF)
        self._write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, short, short, min(size, _FULL), min(start, _FULL), 0))

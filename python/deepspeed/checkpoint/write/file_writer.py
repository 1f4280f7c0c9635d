"""Writes one file of a checkpoint from the memory its tensors are in: past the page cache, with checksums, synced.

The bytes go through a few aligned buffers (``csrc/io``): no second copy of the state is made, whatever its size. A file
that could not be written whole is removed, and the error names it, the operation, the system's reason and what to do.

``DS_IO_FAULT="write|fsync|rename|open:<n>:kill|enospc|eio|short"`` makes the n-th such operation of the process fail,
or kills the process there; tests sweep n. ``rename_dir:1+:exdev,exchange:1+:einval`` is a file system that lacks those;
``csrc/io/faults.h`` has all orders.
"""

import contextlib
import json
import os
import pickle
from dataclasses import asdict, dataclass, field

from deepspeed._native import _C
from deepspeed.checkpoint.write import torch_pickler
from deepspeed.checkpoint.write.torch_pickler import Staging, StoredTensor
from deepspeed.host.cpu import usable_cores

# ---- file record ---------------------------------------------------------------------------------------------------
# What is known of a written file: its size and checksum, and those of every tensor in it.


@dataclass
class TensorRecord:
    """A tensor in a file: ``bytes`` of them at ``offset`` from the start of the file, with their CRC-32.

    ``dtype`` is a name of torch (``float32``); tensors that share memory share the bytes. The bytes are the elements
    in the order of the tensor's memory (``write_torch``) or in row-major order (``write_safetensors``).
    """

    name: str
    dtype: str
    shape: list
    offset: int
    bytes: int
    crc32: int

    def to_dict(self):
        return asdict(self)

    @classmethod
    def from_dict(cls, values):
        return cls(**{**values, "shape": list(values["shape"])})


@dataclass
class FileRecord:
    """A file: its name without the folder, its size, the CRC-32 of all of it, its tensors."""

    name: str
    bytes: int
    crc32: int
    tensors: list = field(default_factory=list)

    def to_dict(self):
        """Plain dicts, lists, texts and numbers, as JSON has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values):
        return cls(**{**values, "tensors": [TensorRecord.from_dict(tensor) for tensor in values.get("tensors", ())]})


# ---- file reader ---------------------------------------------------------------------------------------------------
# Reads ranges of a file into tensors, and checks files against their records, in bounded memory.

__all__ = ["damaged_tensors", "file_crc32", "range_crc32", "read_ranges"]


def threads_for(asked):
    """``asked`` threads for copying and summing; 0: up to four, by the cores this process may use."""
    return asked or min(4, len(usable_cores()))


def read_ranges(path, ranges, threads=0):
    """Fills tensors from a file. ``ranges``: [(offset, tensor)], contiguous tensors on the CPU whose bytes start at
    ``offset``. Raises OSError, RuntimeError for a file that is too short, ValueError for other tensors."""
    made = []
    for offset, tensor in ranges:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"read_ranges fills contiguous tensors on the CPU, got one on {tensor.device}")
        made.append((offset, tensor.numel() * tensor.element_size(), tensor.data_ptr()))
    _C.io.read_ranges(os.fspath(path), made, threads_for(threads))


def range_crc32(path, ranges, threads=0):
    """The CRC-32 of every (offset, bytes) of ``ranges``, in order. Raises OSError, RuntimeError as ``read_ranges``."""
    return _C.io.sum_ranges(os.fspath(path), list(ranges), threads_for(threads))


def file_crc32(path, threads=0):
    """The CRC-32 of all of a file. Raises OSError."""
    return _C.io.sum_ranges(os.fspath(path), [(0, _C.io.TO_THE_END)], threads_for(threads))[0]


def damaged_tensors(path, record, threads=0):
    """The ``TensorRecord``s of ``record`` (a ``FileRecord``) whose bytes in the file ``path`` have another checksum, or
    are not there. Raises OSError when the file cannot be read."""
    size = os.path.getsize(path)
    inside = [tensor for tensor in record.tensors if tensor.offset + tensor.bytes <= size]
    sums = range_crc32(path, [(tensor.offset, tensor.bytes) for tensor in inside], threads)
    bad = {id(tensor) for tensor, crc32 in zip(inside, sums) if tensor.crc32 != crc32}
    bad.update(id(tensor) for tensor in record.tensors if tensor.offset + tensor.bytes > size)
    return [tensor for tensor in record.tensors if id(tensor) in bad]


# ---- file writer ---------------------------------------------------------------------------------------------------

__all__ = [
    "FileRecord", "PreparedBytes", "PreparedSafetensors", "PreparedTorch", "TensorRecord", "WriterOptions", "exchange",
    "inject_fault", "rename", "sync_directory", "write_bytes", "write_safetensors", "write_torch",
]  # fmt: skip

files = _C.io.Files(os.environ.get("DS_IO_FAULT", ""))

VERSION = b"3\n"  # of the archives of torch.save
STAGING_BYTES = 32 << 20  # at most; host memory through which tensors of a GPU pass
SAFETENSORS_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip


@dataclass(frozen=True)
class WriterOptions:
    """How files are written.

    ``io_buffer_size``: bytes of one buffer (a smaller file takes a smaller one). ``double``: two of them, one being
    filled while the other is written. ``threads`` copy and sum; 0: up to four, by the cores this process may use.
    ``direct``: O_DIRECT where the file system has it. ``sync``: fsync at the end.
    """

    io_buffer_size: int = 64 << 20
    double: bool = True
    threads: int = 0
    direct: bool = True
    sync: bool = True

    def arguments(self):
        """What the native writers take after the path and the size."""
        buffers = 2 if self.double else 1
        return self.io_buffer_size, buffers, threads_for(self.threads), self.direct, self.sync


def inject_fault(order):
    """Arms a fault as DS_IO_FAULT does and counts from 0 again; an empty text disarms. Raises ValueError."""
    files.inject(order)


def sync_directory(path):
    """Makes the names in the folder ``path`` safe from a power cut: after new files in it, and after renames."""
    files.sync_directory(os.fspath(path))


def rename(source, target):
    """Gives ``source`` the name ``target``, replacing what had it, in one step; ``sync_directory`` makes it last."""
    files.rename(os.fspath(source), os.fspath(target))


def exchange(a, b):
    """Swaps two files or two folders in one step. Returns False, and has done nothing, where the file system does not
    know RENAME_EXCHANGE."""
    return files.exchange(os.fspath(a), os.fspath(b))


@contextlib.contextmanager
def whole(writer):
    """The ``writer`` of a file, as a context: left by an exception, there is no file."""
    try:
        yield writer
    except BaseException:
        writer.abandon()
        raise


def open_stream(path, size, options):
    """A ``FileStream`` for a file of ``size`` bytes, as a context: left by an exception, there is no file."""
    return whole(_C.io.FileStream(files, os.fspath(path), size, *options.arguments()))


def write_bytes(data, path, options=None):
    """Writes ``data`` (bytes, or any contiguous buffer) to ``path``. Returns its ``FileRecord``. Raises OSError."""
    path, size = os.fspath(path), memoryview(data).nbytes
    with open_stream(path, size, options or WriterOptions()) as stream:
        stream.write(data)
        return FileRecord(os.path.basename(path), *stream.finish())


def write_torch(value, path, options=None):
    """Writes ``value`` so that ``torch.load`` of torch 1.13 and later gives it back, all tensors on the CPU.

    Tensors of every dtype, layout and device; a view is stored with its own elements only; tensors over the same memory
    (tied weights) are stored once and share memory again after loading. Other objects are pickled as torch.save pickles
    them. Attributes set on tensors are left out. Returns the ``FileRecord``; tensors are named by where they stand in
    nested dicts, lists and tuples. Raises OSError, and what pickle raises.
    """
    return PreparedTorch(value).write(path, options)


class PreparedTorch:
    """A file of ``write_torch`` before it is written: the structure is pickled, the tensors are where they were, in
    ``sources``. Who changes tensors before ``write`` puts copies there instead (``StoredTensor``'s ``bytes``,
    ``pieces`` and ``in_place``). Raises what pickle raises.
    """

    def __init__(self, value):
        pickled, records, tensors, _ = torch_pickler.dump(value)
        # The order of torch.save, which readers of offsets rely on.
        self._texts = {
            "data.pkl": pickled,
            ".format_version": b"1",
            ".storage_alignment": b"64",
            "byteorder": b"little",
        }
        self._keys = [key for key, _ in records]
        self.sources = [stored for _, stored in records]
        index = {stored: i for i, stored in enumerate(self.sources)}
        self._tensors = [(name, index[stored], dtype_name(stored.dtype), shape) for name, stored, shape in tensors]

    @property
    def texts(self):
        """What stands before the tensors, in order."""
        return list(self._texts.values())

    def entries(self):
        """(name, bytes) of everything in the archive: the texts, the tensors, and two more."""
        sizes = [(name, len(text)) for name, text in self._texts.items()]
        sizes += [(f"data/{key}", stored.bytes) for key, stored in zip(self._keys, self.sources)]
        sizes += [("version", len(VERSION)), (".data/serialization_id", 40)]
        return [(f"archive/{name}", size) for name, size in sizes]

    def record(self, path, bytes, crc32, places):
        """The ``FileRecord``; ``places``: (offset, bytes, CRC-32) of each tensor's record, in order."""
        made = {}
        for name, i, dtype, shape in self._tensors:
            made.setdefault(name, TensorRecord(name, dtype, list(shape), *places[i]))
        return FileRecord(os.path.basename(path), bytes, crc32, list(made.values()))

    def write(self, path, options=None):
        options = options or WriterOptions()
        path, entries, first = os.fspath(path), self.entries(), len(self._texts)
        with whole(_C.io.ZipWriter(files, path, entries, *options.arguments())) as writer:
            for text in self.texts:
                writer.write(text)
            write_tensors(writer, self.sources, options)
            writer.write(VERSION)
            writer.write(serialization_id(entries, writer.crc32))
            total = writer.finish()
            places = [
                (writer.offset(first + i), entries[first + i][1], writer.crc32[first + i])
                for i in range(len(self.sources))
            ]
        return self.record(path, *total, places)


def write_tensors(writer, stored_tensors, options):
    """Hands the bytes of ``StoredTensor``s to ``writer``, in few calls."""
    staging = Staging(min(STAGING_BYTES, options.io_buffer_size))
    waiting = []  # memory that stays where it is is handed over in one call
    for stored in stored_tensors:
        if stored.in_place():
            waiting.extend(stored.pieces(staging))
            continue
        writer.write_memory(waiting)
        waiting = []
        for piece in stored.pieces(staging):
            writer.write_memory([piece])
    writer.write_memory(waiting)


def serialization_id(entries, crc32):
    """40 digits that tell files of different content apart, as torch 2 writes them."""
    names = _C.io.crc32("".join(name for name, _ in entries).encode())
    content = _C.io.crc32(b"".join(sum.to_bytes(4, "little") for sum in crc32))
    return b"%020d%020d" % (names, content)


def write_safetensors(tensors, metadata, path, options=None):
    """Writes ``tensors`` ({name: tensor}) and ``metadata`` ({text: text} or None) in the safetensors format: no pickle.

    8 bytes of header length, a JSON header padded with spaces to a multiple of 8, the tensors in row-major order; wide
    dtypes first, so that each is aligned. Returns the ``FileRecord``. Raises ValueError for what the format cannot say
    (naming the tensor), OSError.
    """
    return PreparedSafetensors(tensors, metadata).write(path, options)


class PreparedSafetensors:
    """A safetensors file before it is written; ``sources`` as in ``PreparedTorch``."""

    def __init__(self, tensors, metadata=None):
        ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        self.sources = [_stored_row_major(name, tensor) for name, tensor in ordered]
        header, at, self._tensors = {}, 0, []
        if metadata:
            bad = [key for key, text in metadata.items() if not (isinstance(key, str) and isinstance(text, str))]
            if bad:
                raise ValueError(
                    f"safetensors metadata maps text to text only; {bad[0]!r} is not so: pass it as JSON text"
                )
            header["__metadata__"] = dict(metadata)
        for (name, _), item in zip(ordered, self.sources):
            dtype = dtype_name(item.dtype)
            code = SAFETENSORS_NAMES[dtype]
            header[name] = {"dtype": code, "shape": list(item.shape), "data_offsets": [at, at + item.bytes]}
            self._tensors.append((name, dtype, list(item.shape)))
            at += item.bytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        self._header = text + b" " * (-len(text) % 8)
        self._bytes = 8 + len(self._header) + at

    def write(self, path, options=None):
        options = options or WriterOptions()
        path = os.fspath(path)
        staging = Staging(min(STAGING_BYTES, options.io_buffer_size))
        records = []
        with open_stream(path, self._bytes, options) as stream:
            stream.write(len(self._header).to_bytes(8, "little") + self._header)
            for (name, dtype, shape), item in zip(self._tensors, self.sources):
                offset, crc32 = stream.position, 0
                for address, size in item.pieces(staging):
                    crc32 = _C.io.crc32_joined(crc32, stream.write_memory(address, size), size)
                records.append(TensorRecord(name, dtype, shape, offset, item.bytes, crc32))
            return FileRecord(os.path.basename(path), *stream.finish(), records)


class PreparedBytes:
    """A small file of plain bytes."""

    sources = ()

    def __init__(self, data):
        self._data = bytes(data)

    def write(self, path, options=None):
        return write_bytes(self._data, path, options)


def _stored_row_major(name, tensor):
    if not isinstance(name, str) or name == "__metadata__":
        raise ValueError(f"a tensor in a safetensors file needs a name of text other than __metadata__, got {name!r}")
    if not torch_pickler.is_plain(tensor):
        raise ValueError(
            f"the tensor {name!r} ({tensor.layout}, {tensor.device}) is not a dense tensor with elements: safetensors "
            "has no form for it; make it dense (to_dense(), dequantize()) or leave it out"
        )
    if dtype_name(tensor.dtype) not in SAFETENSORS_NAMES:
        raise ValueError(f"the tensor {name!r} is {tensor.dtype}, which safetensors has no name for: convert it")
    return StoredTensor(tensor, row_major=True)


def dtype_name(dtype):
    return str(dtype).split(".")[-1]


# ---- stream file ---------------------------------------------------------------------------------------------------
# The stream of pickles and bare storages that torch.save wrote before zip archives, and reads to this day.
# ``checkpoint.checkpoint_serialization`` false asks for it: a file has no archive around its tensors, so no padding,
# no directory at its end and no checksums of its own; the manifest has those.

MAGIC = 0x1950A86A20F9469CFC6C
_STREAM_FILE_VERSION = 1001
SYSTEM = {"protocol_version": _STREAM_FILE_VERSION, "little_endian": True,
          "type_sizes": {"short": 2, "int": 4, "long": 4}}  # fmt: skip


class PreparedStream:
    """A file of ``torch.save(value, path, _use_new_zipfile_serialization=False)`` before it is written; ``sources`` as
    in ``file_writer.PreparedTorch``. Raises what pickle raises."""

    def __init__(self, value):
        pickled, records, tensors, counts = torch_pickler.dump(value, stream=True)
        self.sources = [stored for _, stored in records]
        self._counts = [counts[key] for key, _ in records]
        keys = [key for key, _ in records]
        parts = [pickle.dumps(part, torch_pickler.PROTOCOL) for part in (MAGIC, _STREAM_FILE_VERSION, SYSTEM)]
        self._head = b"".join([*parts, pickled, pickle.dumps(keys, torch_pickler.PROTOCOL)])
        index = {id(stored): i for i, stored in enumerate(self.sources)}
        self._tensors = [
            (name, index[id(stored)], dtype_name(stored.dtype), list(shape)) for name, stored, shape in tensors
        ]

    def write(self, path, options=None):
        options = options or WriterOptions()
        staging = Staging(min(STAGING_BYTES, options.io_buffer_size))
        size = len(self._head) + sum(8 + source.bytes for source in self.sources)
        with open_stream(path, size, options) as stream:
            stream.write(self._head)
            places = []
            for source, count in zip(self.sources, self._counts):
                stream.write(count.to_bytes(8, "little"))
                offset, crc32 = stream.position, 0
                for address, part in source.pieces(staging):
                    crc32 = _C.io.crc32_joined(crc32, stream.write_memory(address, part), part)
                places.append((offset, source.bytes, crc32))
            total = stream.finish()
        made = {}
        for name, i, dtype, shape in self._tensors:
            made.setdefault(name, TensorRecord(name, dtype, shape, *places[i]))
        return FileRecord(os.path.basename(path), *total, list(made.values()))


# ---- kinds ---------------------------------------------------------------------------------------------------------
# What kinds of file a checkpoint has: the ending of the name says which, and how its value becomes a file.

# Ending -> what makes of a file's value something with `sources` (memory, read later) and `write(path, options)`.
KINDS = {
    ".pt": PreparedTorch,
    ".safetensors": lambda value: PreparedSafetensors(*value),  # (tensors, metadata)
    ".json": PreparedBytes,
}


def prepare(name, value, archive=True):
    """``value`` as the file ``name``, not yet written. A value that is prepared already stays as it is. ``archive``:
    files of torch.save are zip archives, as ``checkpoint.checkpoint_serialization`` says, and not streams."""
    if hasattr(value, "sources") and hasattr(value, "write"):
        return value
    kind = KINDS.get(os.path.splitext(name)[1], PreparedTorch)
    return (PreparedStream if kind is PreparedTorch and not archive else kind)(value)

"""Writes one file of a checkpoint from the memory its tensors are in: past the page cache, with checksums, synced.

The bytes go through a few aligned buffers (``csrc/io``): no second copy of the state is made, whatever its size. A file
that could not be written whole is removed, and the error names it, the operation, the system's reason and what to do.

``DS_IO_FAULT="write|fsync|rename|open:<n>:kill|enospc|eio|short"`` makes the n-th such operation of the process fail,
or kills the process there; tests sweep n. ``rename_dir:1+:exdev,exchange:1+:einval`` is a file system that lacks those;
``csrc/io/faults.h`` has all orders.
"""

import os
import zlib
from dataclasses import dataclass

import torch

from deepspeed import _compat
from deepspeed._native import _C
from deepspeed.formats.weight_files import SAFETENSORS_DTYPES, write_whole
from deepspeed.host.cpu import usable_cores
from deepspeed.zero.parameters.tensor_of_pieces import TensorOfPieces

# ---- file record ---------------------------------------------------------------------------------------------------
# Records of written files, in the form of manifests.

# A tensor in a file: ``bytes`` bytes at ``offset`` from the start of the file, with their CRC-32. ``dtype`` is a name
# of torch (``float32``); tensors that share memory share the bytes. The bytes are the elements in the order of the
# tensor's memory (``PreparedTorch``) or in row-major order (``PreparedSafetensors``).
_OF_TENSORS = ("name", "dtype", "shape", "offset", "bytes", "crc32")


def file_record(path, bytes, crc32, tensors=()):
    """The record of a file, a dict: its name without the folder, its size, the CRC-32 of all of it, its tensors."""
    tensors = [dict(zip(_OF_TENSORS, tensor, strict=True)) for tensor in tensors]
    return {"name": os.path.basename(path), "bytes": bytes, "crc32": crc32, "tensors": tensors}


def threads_for(asked):
    """``asked`` threads for copying and summing; 0: up to four, by the cores this process may use."""
    return asked or min(4, len(usable_cores()))


def file_crc32(path, threads=0):
    """The CRC-32 of all of a file. Raises OSError."""
    return _C.io.sum_ranges(os.fspath(path), [(0, _C.io.TO_THE_END)], threads_for(threads))[0]


# ---- file writer ---------------------------------------------------------------------------------------------------

files = _C.io.Files(os.environ.get("DS_IO_FAULT", ""))

# dtype (float32) -> its code in safetensors (F32)
SAFETENSORS_NAMES = {str(dtype).removeprefix("torch."): code for code, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class WriterOptions:
    """The way in which files are written.

    ``io_buffer_size``: bytes of one buffer (a smaller file takes a smaller one). ``double``: two of them, one being
    filled while the other is written. ``threads`` copy and sum; 0: up to four, by the cores this process may use.
    ``direct``: O_DIRECT where the file system has it. ``sync``: fsync at the end. ``staged``: tensors pass through host
    memory of at most 32 MiB even where they are in such memory, as those of a GPU do. ``mapped``: for files in
    /dev/shm, which are filled in one pass; what has the name of a file already is written over.
    """

    io_buffer_size: int = 64 << 20
    double: bool = True
    threads: int = 0
    direct: bool = True
    sync: bool = True

    staged: bool = False
    mapped: bool = False

    def arguments(self):
        """The arguments of the native writers after the path and the size."""
        buffers = 2 if self.double else 1
        return self.io_buffer_size, buffers, threads_for(self.threads), self.direct, self.sync, self.staged, self.mapped


# ``inject_fault(order)`` arms a fault as DS_IO_FAULT does and counts from 0 again; an empty text disarms. ValueError.
inject_fault = files.inject
# ``sync_directory(path)`` makes the names in a folder safe from a power cut: after new files in it, and after renames.
sync_directory = files.sync_directory
# ``rename(source, target)`` gives ``source`` another name, replacing what had it, in one step; see ``sync_directory``.
rename = files.rename
# ``exchange(a, b)`` swaps two files or two folders in one step. Returns False, and has done nothing, where the file
# system does not know RENAME_EXCHANGE.
exchange = files.exchange


class PicklerHooks:
    """Answers to questions of the pickler in C++ about the classes of tensors, storages and ``TensorOfPieces``."""

    parameter, tensor, pieces = torch.nn.Parameter, torch.Tensor, TensorOfPieces
    untyped = getattr(torch, "UntypedStorage", None)
    _names = torch.storage._dtype_to_storage_type_map()

    @classmethod
    def storage_class(cls, dtype):
        """The class of storages of a dtype, None for one that is newer than these classes."""
        return getattr(torch, cls._names[dtype]) if dtype in cls._names else None

    @classmethod
    def storage(cls, value):
        """Describes a storage (its class, its bytes as a tensor, bytes of an element); None for anything else."""
        if isinstance(value, torch.storage.TypedStorage):
            kind, dtype, value = cls.storage_class(value.dtype), value.dtype, _compat.untyped_storage(value)
        elif torch.is_storage(value):
            kind, dtype = type(value), torch.uint8
        else:
            return None
        content = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)
        return kind, content, torch.empty(0, dtype=dtype).element_size()


class Prepared:
    """A file before it is written: its structure is made, the tensors are where they were, in ``sources``. Who changes
    tensors before ``write`` puts copies of them there instead."""

    def __init__(self, native):
        self.native = native

    @property
    def sources(self):
        return self.native.sources

    @sources.setter
    def sources(self, sources):
        self.native.sources = list(sources)

    def write(self, path, options=None):
        """Writes it to ``path``. Returns its record. Raises OSError."""
        path, options = os.fspath(path), options or WriterOptions()
        return file_record(path, *self.native.write(files, path, options.arguments()))


class PreparedTorch(Prepared):
    """A file from which ``torch.load`` of torch 1.13 and later gives ``value`` back, all tensors on the CPU.

    Tensors of every dtype, layout and device; a view is stored with its own elements only; tensors over the same memory
    (tied weights) are stored once and share memory again after loading. Other objects are pickled as torch.save pickles
    them. Attributes set on tensors are left out. The record names tensors by where they stand in nested dicts, lists
    and tuples. Raises what pickle raises.
    """

    def __init__(self, value):
        super().__init__(_C.prepared.torch_file(value, PicklerHooks))


class PreparedStream(Prepared):
    """A file of ``torch.save(value, path, _use_new_zipfile_serialization=False)`` before it is written: pickles and
    bare storages. ``checkpoint.checkpoint_serialization`` false asks for it: a file has no archive around its tensors,
    so no padding, no directory at its end and no checksums of its own; the manifest has those."""

    def __init__(self, value):
        super().__init__(_C.prepared.stream_file(value, PicklerHooks, [MAGIC, _STREAM_FILE_VERSION, SYSTEM]))


class TorchSaveFile:
    """A file that ``torch.save`` itself writes, for the checkpoint engines that promise this. ``archive``: a zip
    archive, not a stream. ``sync``: with an fsync at the end."""

    sources = ()

    def __init__(self, value, archive=True, sync=False):
        self.value, self.archive, self.sync = value, archive, sync

    def write(self, path, options=None):
        """Writes it to ``path``. Returns its record, which names no tensors. Raises OSError."""
        with open(path, "wb") as file:
            summed = _Summed(file)
            torch.save(self.value, summed, _use_new_zipfile_serialization=self.archive)
            file.flush()
            if self.sync:
                os.fsync(file.fileno())
        return file_record(path, summed.bytes, summed.crc32)


class _Summed:
    """A file with the size and CRC-32 of what was written to it."""

    def __init__(self, file):
        self._file = file
        self.bytes = self.crc32 = 0

    def write(self, data):
        self.crc32 = zlib.crc32(data, self.crc32)
        self.bytes += len(data)
        return self._file.write(data)

    def flush(self):
        self._file.flush()


def replace_file(prepared, path, options=None):
    """Writes a prepared file through a temporary one beside ``path``: a crash leaves no half file under that name, and
    the file that was there may still be open. Returns its record. Raises OSError, which names the file."""
    written = []
    write_whole(path, lambda temporary, content: written.append(content.write(temporary, options)), prepared)
    return {**written[-1], "name": os.path.basename(path)}


class PreparedSafetensors(Prepared):
    """``tensors`` ({name: tensor}) and ``metadata`` ({text: text} or None) in the safetensors format: no pickle.

    8 bytes of header length, a JSON header padded with spaces to a multiple of 8, the tensors in row-major order; wide
    dtypes first, so that each is aligned. Raises ValueError, which names the tensor, for what the format cannot say.
    """

    def __init__(self, tensors, metadata=None):
        super().__init__(_C.prepared.safetensors_file(dict(tensors), metadata))


class PreparedBytes(Prepared):
    """A small file of plain bytes, or of any contiguous buffer."""

    def __init__(self, data):
        super().__init__(_C.prepared.bytes_file(data))


def is_plain(tensor):
    """Whether a tensor is dense, with elements."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


MAGIC = 0x1950A86A20F9469CFC6C
_STREAM_FILE_VERSION = 1001
SYSTEM = {"protocol_version": _STREAM_FILE_VERSION, "little_endian": True,
          "type_sizes": {"short": 2, "int": 4, "long": 4}}  # fmt: skip


# ---- shared file ---------------------------------------------------------------------------------------------------
# One file of torch.save that several ranks write, who have the same in memory: each writes one range of it.

# Where ``count`` writers part the file with ``entries`` [(name, bytes)]: ``Cuts(entries, texts, count)``. The first
# ``texts`` of those are no tensors but the first writer's, and the last two are left to the end.
Cuts = _C.prepared.ArchiveCuts


class SharedTorch(Prepared):
    """One writer's part of the file ``prepared`` (``PreparedTorch``). Its record has ``bytes``, and as ``part`` what it
    has written: [(entry, offset in it, bytes, CRC-32)]."""

    def __init__(self, prepared, cuts, index):
        super().__init__(_C.prepared.ArchivePart(prepared.native, cuts, index))

    def write(self, path, options=None):
        options = options or WriterOptions()
        runs = self.native.write(files, os.fspath(path), options.arguments())
        return {"bytes": self.native.bytes, "part": runs}


def complete(path, prepared, cuts, parts):
    """Ends the file when all have written theirs. ``parts``: the runs of every writer. Returns its record.
    Raises OSError."""
    runs = [tuple(run) for runs in parts for run in runs]
    return file_record(path, *_C.prepared.complete_archive(path, prepared.native, cuts, runs))


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
